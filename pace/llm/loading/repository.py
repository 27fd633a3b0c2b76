"""Chooses the files of a checkpoint in a repository: one config, one tokenizer, one set of weights.

    needed_files(names, read_index)       for a checkpoint in safetensors, else in .bin
    gguf_files(names, "Q4_K_M", "org/x")  for a GGUF file, with all of its shards

Names are relative to the top of the repository, with "/" between folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from pace.checkpoints.gguf.shards import MAX_SHARDS, SHARD_NAME
from pace.checkpoints.reader import GPTQ_NAME, INDEX_SUFFIX, OTHER_WEIGHT_SUFFIXES, SAFETENSORS_NAME, TORCH_NAME
from pace.llm.decisions.config import DECISION_FILES
from pace.llm.processors.settings import FILES as PROCESSOR_FILES
from pace.naming import listed
from pace.tokenizer.loading import TOKENIZER_FILES, VOCABULARY_FILES

QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files in which AutoGPTQ, AutoAWQ and ModelOpt described the quantisation before config.json did, and their
`quant_method`."""
CONFIG_FILES = ("config.json", "generation_config.json", *DECISION_FILES, *PROCESSOR_FILES, *QUANTIZATION_FILES)
ENCODING_FILES = (
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "[0-9]_*/config.json",
    "[0-9]_Dense/model.safetensors", "[0-9]_Dense/pytorch_model.bin",
)  # fmt: skip
"""Patterns of sentence-transformers' files (pace/llm/encoding/settings.py)."""
DEFAULT_QUANT = "Q4_K_M"
"""Default quant of a GGUF repository, as in llama.cpp."""
QUANT_LABEL = re.compile(r"(?<![^\W_])(?:I?Q\d_\w+|TQ\d_\d|BF16|F16|F32|FP16|FP32|MXFP4)(?![^\W_])", re.IGNORECASE)
"""Name of a ggml type within a file's name."""
QUANT_TYPE = re.compile(r"(i?q|tq|fp|b?f|mxfp|nvfp)\d", re.IGNORECASE)
"""Beginning of the name of a ggml type."""
VARIANTS = r"(?<![^\W_])(ud|i1)[-._]"
"""Prefixes by unsloth and mradermacher for a type chosen layer by layer, or with statistics."""


def needed_files(
    names: Iterable[str],
    shards_of: Callable[[str], Iterable[Path]],
    weights: bool = True,
    where: str = "the repository",
) -> list[str]:
    """Returns the files to download of a repository that is no GGUF repository, weights last. `shards_of(index name)`
    returns the shards in an index. `where` names the repository in error messages.

    Raises FileNotFoundError if the repository has no config.json or no usable weights.
    """
    names = sorted(names)
    patterns = (*TOKENIZER_FILES, *ENCODING_FILES)
    wanted = [name for name in names if name in CONFIG_FILES or any(fnmatch(name, pattern) for pattern in patterns)]
    if not weights:
        return wanted
    if "config.json" not in names:
        raise FileNotFoundError(f"{where} has no config.json; it has {some(names)}")
    for name in (SAFETENSORS_NAME, TORCH_NAME):
        if name in names:
            return [*wanted, name]
        if name + INDEX_SUFFIX in names:
            shards = sorted({path.as_posix() for path in shards_of(name + INDEX_SUFFIX)})
            return [*wanted, name + INDEX_SUFFIX, *shards]
    if len(found := [name for name in names if fnmatch(name, GPTQ_NAME)]) == 1:
        return [*wanted, *found]
    others = [name for name in names if name.endswith(OTHER_WEIGHT_SUFFIXES)]
    raise FileNotFoundError(
        f"{where} has no {SAFETENSORS_NAME} or {TORCH_NAME}, single or sharded; it has {some(others or names)}"
    )


def is_gguf_repository(names: Iterable[str], weights: bool = True) -> bool:
    """True if the model must be read from a GGUF file: there is one, and no other weights. Without `weights`, the same
    for the tokenizer."""
    names = set(names)
    others = {name + end for name in (SAFETENSORS_NAME, TORCH_NAME) for end in ("", INDEX_SUFFIX)}
    others |= set() if weights else set(VOCABULARY_FILES)
    return bool(gguf_models(names)) and not names & others and not any(fnmatch(name, GPTQ_NAME) for name in names)


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files that are models: name of the first shard -> names of all present shards, in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _is_beside_model(name):
            models.setdefault(SHARD_NAME.sub(r"\g<stem>-00001-of-\g<count>.gguf", name), []).append(name)
    return models


def _is_beside_model(name: str) -> bool:
    """True for image encoders, and for statistics of calibration. A model that was made with these may name them, too,
    but also its type."""
    return "mmproj" in name.lower() or "imatrix" in name.lower() and not QUANT_LABEL.search(_stem(name))


def gguf_files(names: Iterable[str], quant: str | None, where: str) -> list[str]:
    """Returns the GGUF file of `quant` and all its shards, the first one first. A quant is a part of the name between
    separators, in any case, or a file's name; None means Q4_K_M, else the only file.

    Raises FileNotFoundError if no file matches or a shard is missing, ValueError if several files match. `where` names
    the repository or directory in error messages.
    """
    models = gguf_models(names)
    if not models:
        raise FileNotFoundError(
            f"{where} has no GGUF file, so there is no {quant!r} to choose; leave out ':{quant}' (and "
            f"quantise while loading with quantization='int4', for example)"
        )
    found = _meant(models, quant or DEFAULT_QUANT)
    if not found and quant is None and len(models) == 1:
        found = list(models)
    if len(found) != 1:
        known = listed(found or models)
        example = f"{where}:{_label(next(iter(found or models)))}"
        if found:
            raise ValueError(
                f"{where} has several GGUF files of {quant or DEFAULT_QUANT}: {known}; give the name of one, such as "
                f"{where}:{found[0]}"
            )
        if quant is None:
            raise ValueError(
                f"{where} has several GGUF files, but none of {DEFAULT_QUANT}; name one of them, such as {example}. "
                f"It has {known}"
            )
        raise FileNotFoundError(f"{where} has no GGUF file of {quant!r}; it has {known}")
    return _all_shards(found[0], models[found[0]], where)


def mmproj_files(names: Iterable[str], model: str) -> list[str]:
    """Returns the mmproj files for a GGUF file, the best first. They are in its folder or in one above it. The nearest
    folder counts most, then a name like the model's, because a folder may have files of several models. Then the number
    of bits nearest to the model's counts, as in llama.cpp."""
    folders = [parent.as_posix() for parent in PurePosixPath(model).parents]
    found = [name for name in sorted(names) if re.search(r"mmproj[^/]*\.gguf$", name, re.IGNORECASE)]
    depths = {name: folders.index(folder) for name in found if (folder := _folder(name)) in folders}
    bits = lambda name: abs(_num_bits(name) - _num_bits(model))
    return sorted(depths, key=lambda name: (depths[name], len(_words(name) - _words(model)), bits(name)))


def _folder(name: str) -> str:
    return PurePosixPath(name).parent.as_posix()


def _words(name: str) -> set[str]:
    """The words in a file's name, without its type: a model's name, its version and size."""
    stem = re.sub(r"[-._](bf|fp?|i?q|tq|mxfp)\d\w*$", "", _stem(PurePosixPath(name).name).lower())
    return {*re.split(r"[-_ ]|\.(?!\d)", stem)} - {"mmproj", "model"}


def _num_bits(name: str) -> int:
    """The bits of the type at the end of a file's name: 4 for Q4_K_M, 16 for F16, 0 without a type."""
    found = re.search(r"[-.][^\W\d]*(\d+)\w*$", _stem(name))
    return int(found[1]) if found else 0


def _meant(models: Iterable[str], quant: str) -> list[str]:
    """Files that match a quant or a file's name."""
    quant = quant.lower().strip("/")
    if named := [name for name in models if name.lower() == quant or name.lower().rpartition("/")[2] == quant]:
        return named
    before = "-./_" if QUANT_TYPE.match(quant) else "-./"
    pattern = rf"(?:^|[{before}]){re.escape(quant)}(?=[-./]|$)"
    found = [name for name in models if re.search(pattern, _stem(name).lower())]
    plain = [name for name in found if not re.search(VARIANTS + re.escape(quant), _stem(name).lower())]
    return plain or found


def _stem(name: str) -> str:
    """A name without its suffix and shard number."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name, flags=re.IGNORECASE)


def _label(name: str) -> str:
    """The quant in a file's name, or the whole name if there is none."""
    found = re.findall(r"(?:UD-|i1-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|FP16|FP32|MXFP4\w*)$", _stem(name), re.IGNORECASE)
    return found[-1] if found else name


def _all_shards(first: str, present: list[str], where: str) -> list[str]:
    """Returns the names of all shards. Raises FileNotFoundError if one is missing."""
    shard = SHARD_NAME.fullmatch(first)
    if not shard:
        return [first]
    count = int(shard["count"])
    if not 1 <= count <= MAX_SHARDS:
        raise ValueError(f"{first} in {where} is one of {count} shards by its name; at most {MAX_SHARDS} are supported")
    wanted = [f"{shard['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if missing := [name for name in wanted if name not in present]:
        raise FileNotFoundError(f"{where} lacks {some(missing)}, from the {count} shards of a GGUF file")
    return wanted


def some(names: list[str]) -> str:
    """The first few names, for an error message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
