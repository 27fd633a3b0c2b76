"""Which files of a repository make a checkpoint: one config, one tokenizer, one set of weights.

    needed_files(names, read_index)       of a checkpoint in safetensors, else in .bin
    gguf_files(names, "Q4_K_M", "org/x")  of a GGUF file, with all of its shards

Names are those of files below the top of the repository, with "/" between folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path

from pace.checkpoints.gguf.shards import MAX_SHARDS, SHARD_NAME
from pace.checkpoints.reader import GPTQ_NAME, INDEX_SUFFIX, OTHER_WEIGHT_SUFFIXES, SAFETENSORS_NAME, TORCH_NAME
from pace.tokenizer.loading import TOKENIZER_FILES, VOCABULARY_FILES

QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Where AutoGPTQ, AutoAWQ and ModelOpt said how weights are quantised before config.json did, and the `quant_method`
that they meant."""
CONFIG_FILES = ("config.json", "generation_config.json", *QUANTIZATION_FILES)
DEFAULT_QUANT = "Q4_K_M"
"""What is taken of a GGUF repository unless the user says otherwise, as llama.cpp does."""
NOT_A_MODEL = ("mmproj", "imatrix")
"""In the names of GGUF files that go with a model: what encodes pictures, and statistics of calibration."""
QUANT_TYPE = re.compile(r"(i?q|tq|fp|b?f|mxfp|nvfp)\d", re.IGNORECASE)
"""How the name of a ggml type begins."""
VARIANTS = r"(?<![^\W_])(ud|i1)[-._]"
"""What unsloth and mradermacher put before a type that was chosen layer by layer, or with statistics."""
MAX_LISTED = 40


def needed_files(
    names: Iterable[str],
    shards_of: Callable[[str], Iterable[Path]],
    weights: bool = True,
    where: str = "the repository",
) -> list[str]:
    """Files to download of a repository that is no GGUF repository; `shards_of(index name)` gives the shards that an
    index names. Weights come last. `where` names the repository in messages.

    Raises FileNotFoundError where the repository has no config.json or no weights that can be used.
    """
    names = sorted(names)
    wanted = [
        name for name in names if name in CONFIG_FILES or any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)
    ]
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
    """Whether the model is to be read from a GGUF file: there is one, and no other weights. Without `weights`, whether
    the tokenizer is."""
    names = set(names)
    others = {name + end for name in (SAFETENSORS_NAME, TORCH_NAME) for end in ("", INDEX_SUFFIX)}
    others |= set() if weights else set(VOCABULARY_FILES)
    return bool(gguf_models(names)) and not names & others and not any(fnmatch(name, GPTQ_NAME) for name in names)


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files that are models: name of the first shard -> names of all shards that are there, in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not any(word in name.lower() for word in NOT_A_MODEL):
            models.setdefault(SHARD_NAME.sub(r"\g<stem>-00001-of-\g<count>.gguf", name), []).append(name)
    return models


def gguf_files(names: Iterable[str], quant: str | None, where: str) -> list[str]:
    """The GGUF file that `quant` means, and all its shards, the first first. A quant is a part of the name between
    separators, in any case, or a file's name; None means Q4_K_M, else the only file.

    Raises FileNotFoundError where no file is meant or a shard is missing, ValueError where several files are. `where`
    names the repository or directory in messages.
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
        listed = _listed(found or models)
        example = f"{where}:{_label(next(iter(found or models)))}"
        if found:
            raise ValueError(
                f"{where} has several GGUF files of {quant or DEFAULT_QUANT}: {listed}; give the name of one, such as "
                f"{where}:{found[0]}"
            )
        if quant is None:
            raise ValueError(
                f"{where} has several GGUF files and none of {DEFAULT_QUANT}; say which one, such as {example}. "
                f"It has {listed}"
            )
        raise FileNotFoundError(f"{where} has no GGUF file of {quant!r}; it has {listed}")
    return _all_shards(found[0], models[found[0]], where)


def _meant(models: Iterable[str], quant: str) -> list[str]:
    """The files of a quant, or of a file's name."""
    quant = quant.lower().strip("/")
    if named := [name for name in models if name.lower() == quant or name.lower().rpartition("/")[2] == quant]:
        return named
    before = "-./_" if QUANT_TYPE.match(quant) else "-./"
    pattern = rf"(?:^|[{before}]){re.escape(quant)}(?=[-./]|$)"
    found = [name for name in models if re.search(pattern, _stem(name).lower())]
    plain = [name for name in found if not re.search(VARIANTS + re.escape(quant), _stem(name).lower())]
    return plain or found


def _stem(name: str) -> str:
    """A name without its suffix and without the number of a shard."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name, flags=re.IGNORECASE)


def _label(name: str) -> str:
    """The quant in a file's name; the name where there is none."""
    found = re.findall(r"(?:UD-|i1-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|FP16|FP32|MXFP4\w*)$", _stem(name), re.IGNORECASE)
    return found[-1] if found else name


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:MAX_LISTED]) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")


def _all_shards(first: str, present: list[str], where: str) -> list[str]:
    """Names of all shards; FileNotFoundError where one is missing."""
    shard = SHARD_NAME.fullmatch(first)
    if not shard:
        return [first]
    count = int(shard["count"])
    if not 1 <= count <= MAX_SHARDS:
        raise ValueError(f"{first} in {where} is named as a shard of {count}; at most {MAX_SHARDS} are read")
    wanted = [f"{shard['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if missing := [name for name in wanted if name not in present]:
        raise FileNotFoundError(f"{where} lacks {some(missing)}, of the {count} shards of one GGUF file")
    return wanted


def some(names: list[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
