"""Turns a float checkpoint and a text into a quantised checkpoint: `quantize_checkpoint`.

This module checks the arguments, finds the files and moves the new directory into place; `job.Job` does the work."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pace.calibrate import encoding
from pace.calibrate.job import Job
from pace.calibrate.method import DEFAULT_METHODS, Method, check_formats, read_method
from pace.calibrate.report import Quality, Report, compare_models
from pace.calibrate.texts import MAX_TOKENS, MIN_TOKENS, choose_windows
from pace.checkpoints.files import file_inside
from pace.checkpoints.gguf.file import is_gguf
from pace.checkpoints.reader import CheckpointReader
from pace.llm.adapters.read import read_adapter
from pace.llm.encoding.settings import MODULES_FILE
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.loading.find import find_checkpoint
from pace.llm.loading.model import make_encoder, make_model
from pace.llm.loading.options import use_threads
from pace.llm.loading.progress import progress_bar
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.encoders.encoder import Encoder
from pace.llm.models.encoders.encoder_list import find_encoder
from pace.ops import reference
from pace.quant import Format, QuantizationConfig, read_quantization
from pace.quant.config import AUTO
from pace.tokenizer.loading import load_tokenizer

logger = logging.getLogger("pace")

COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Suffixes of a checkpoint's small files that are copied: tokenizer, chat template, generation config."""


def quantize_checkpoint(
    model_name_or_path: str | Path,
    out: str | Path,
    quantization: Any = "int4",
    calibrate: Sequence[str] | None = None,
    *,
    method: str | None = None,
    act_order: bool | None = None,
    context: int | None = None,
    max_tokens: int | None = None,
    tokenizer_name_or_path: str | Path | None = None,
    num_threads: int | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    progress: bool = True,
    report: bool = True,
    adapter: str | Path | None = None,
) -> Report:
    """Writes the directory `out`: the checkpoint with int4 or int8 matrices in the compressed-tensors layout, for
    `LLMModel(out)`, or `EmbeddingModel(out)` for an encoder.

    `quantization`: "int4" or "int8", or a QuantizationConfig of these, as in `LLMModel`.
    `calibrate`: texts like those the model will read. Optional for the method "rtn".
    `method`: see below. Default: "awq+gptq" for int4, "smoothquant" for int8.
    `act_order`: GPTQ rounds the most used columns first, unless this is False.
    `context`, `max_tokens`: texts are read in windows of `context` tokens (default: 512, or the model's maximum). About
    `max_tokens` are read in all (default: 32768), evenly spread. Every eighth window is kept for the report.
    `adapter`: a LoRA adapter to merge into the weights before they are rounded, as `LLMModel(adapter=, merge=True)`.
    `report`: compares the result, and the same formats quantised at load, with bfloat16 on the kept windows. If no
    comparison is possible, the report gives the reason.

    Methods: "gptq" rounds column by column, so that later columns compensate for the errors of earlier ones. "awq" and
    "smoothquant" first scale channels if the preceding layer can undo it exactly, then round to the nearest code.
    "awq+gptq" and "smoothquant+gptq" do both. "rtn" only rounds to the nearest code, and is the one for encoders.

    The same arguments give the same file on the same machine.

    **Memory**: one decoder layer in float32, and the text's hidden states (4 bytes for each token and channel). GPTQ
    takes some 60 bytes for each pair of inputs of a product, the report takes two models.

    Raises ValueError or TypeError for invalid arguments or ones without effect, and for a text of fewer than 256
    tokens. Raises ValueError for formats other than int4 and int8, and for a checkpoint that is already quantised.
    Raises NotImplementedError for a text or a calibrated method with an encoder.
    Raises what `LLMModel` raises for a checkpoint, and FileExistsError if `out` exists.

    Before anything is read, raises MemoryError if there is less memory than the work is sure to need. Warns if there is
    less than it is likely to need. Raises OSError if the disk has no room for `out`. On failure nothing is left of
    `out`."""
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists already; give a new directory")
    _refuse_gguf(Path(model_name_or_path))
    config = _read_formats(quantization)
    usual = read_method(method or DEFAULT_METHODS[config.format.name], act_order)
    of_text = {"context": context, "max_tokens": max_tokens, "tokenizer_name_or_path": tokenizer_name_or_path}
    if method is not None:
        _check_text_options(usual, calibrate is not None, report, of_text)
    use_threads(num_threads)
    hub = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only, "progress": progress}

    def look(path: Path) -> tuple[dict[str, Any], BaseModelForCausalLM | Encoder, Method]:
        raw, model = _read_floats(path)
        chosen = usual
        if isinstance(model, Encoder):
            chosen = read_method(method or "rtn", act_order)
            if chosen.is_calibrated or calibrate is not None:
                raise NotImplementedError(
                    "calibrate must be left out, with method='rtn': an encoder is not calibrated on a text"
                )
            if config.lm_head != AUTO:
                raise ValueError("lm_head would have no effect on an encoder, which has no LM head; leave it out")
        _check_text_options(chosen, calibrate is not None, report, of_text)
        return raw, model, chosen

    directory = find_checkpoint(model_name_or_path, revision=revision, **hub, check=look)
    raw, model, chosen = look(directory)
    seen, kept = [], []
    if calibrate is not None:
        found = directory
        if tokenizer_name_or_path is not None:
            found = find_checkpoint(tokenizer_name_or_path, **hub, weights=False)
        tokenizer = load_tokenizer(found, model.vocab_size)
        seen, kept = choose_windows(calibrate, tokenizer, model, context, max_tokens or MAX_TOKENS)
        if not chosen.is_calibrated:
            seen, kept = [], kept or seen
    with CheckpointReader(directory) as reader, _new_directory(out) as folder:
        if model.other_parts and any(name.startswith(model.other_parts) for name in reader.tensors):
            logger.warning(
                "only the text model of %s is quantised; the result takes no images or sound, because its towers "
                "are left out",
                directory.name,
            )
        merged = None if adapter is None else read_adapter(adapter, str(adapter), Checkpoint(directory))
        job = Job(model, reader, config, chosen, folder, sum(map(len, seen)), merged)
        with progress_bar(len(model.layers), f"Quantising {directory.name}", progress, unit="layer") as done:
            job.run(seen, done)
        _copy_small_files(directory, folder)
        _copy_modules(directory, folder)
        _write_config(folder, raw, job)
    quality, not_compared = None, None
    if report and calibrate is None:
        not_compared = "no text was given"
    elif report and not kept:
        not_compared = "the text is too short to keep a window for it; give more text, or a smaller context"
    elif report:
        quality, not_compared = _quality(directory, out, config, kept, tokenizer_name_or_path, progress, adapter)
    return Report(
        out=out,
        format=str(config.format),
        method=str(chosen),
        num_tokens=sum(map(len, seen)),
        bytes_before=reader.total_bytes,
        bytes_after=(out / "model.safetensors").stat().st_size,
        met_few=tuple(job.met_few),
        head=job.head,
        quality=quality,
        not_compared=not_compared,
    )


def _read_formats(quantization: Any) -> QuantizationConfig:
    """Returns the formats to write. Raises ValueError if none are given, or for one that no method supports."""
    config = read_quantization(quantization)
    if config is None:
        raise ValueError("quantization must be 'int4' or 'int8'; got None")
    choices = (config.format, config.embedding, config.lm_head, *config.overrides.values())
    if config.format is None:
        raise ValueError("pace quantize needs int4 or int8 for the layers; got float")
    check_formats({choice.name: choice for choice in choices if isinstance(choice, Format)}.values())
    return config


def _check_text_options(method: Method, has_text: bool, report: bool, of_text: dict[str, Any]) -> None:
    """Raises ValueError if the text or the options for reading it (`of_text`) do not fit the method."""
    max_tokens, given = of_text["max_tokens"], [name for name, value in of_text.items() if value is not None]
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < MIN_TOKENS):
        raise ValueError(f"max_tokens must be at least {MIN_TOKENS}; got {max_tokens!r}")
    if not has_text and method.is_calibrated:
        raise ValueError(f"the method {method} needs a text to calibrate on; give one (calibrate), or method='rtn'")
    if not has_text and given:
        raise ValueError(f"{' and '.join(given)} would have no effect without a text; give one (calibrate)")
    if has_text and not method.is_calibrated and not report:
        raise ValueError(f"the text would have no effect on the method {method} with report=False; leave it out")
    if has_text and not method.is_calibrated and max_tokens is not None:
        raise ValueError(f"max_tokens={max_tokens} would have no effect on the method {method}; leave it out")


def _read_floats(directory: Path) -> tuple[dict[str, Any], BaseModelForCausalLM | Encoder]:
    """Reads the config.json of a float checkpoint, and makes its model without weights. Raises ValueError for a GGUF
    file, and for a checkpoint that is already quantised."""
    _refuse_gguf(directory)
    checkpoint = Checkpoint(directory)
    raw = checkpoint.config
    make = make_model if find_encoder(raw) is None else make_encoder
    model = make(checkpoint, torch.float32, reference)
    if model.config.quantization_config is not None:
        raise ValueError(f"{directory} is quantised already; give the original checkpoint")
    return raw, model


def _refuse_gguf(path: Path) -> None:
    if is_gguf(path):
        raise ValueError(
            f"{path} is a GGUF file, and only checkpoints with config.json and safetensors are read here: give the "
            f"model's original one, a directory or Hub id"
        )


def _write_config(folder: Path, raw: dict[str, Any], job: Job) -> None:
    """Writes the original config.json with a `quantization_config`."""
    output = job.output
    layouts = {output.module(part): layout for part, layout in job.layouts.items()}
    embeddings = {output.module(part) for part in job.embeddings}
    tied = output.tied and output.module(output.tied)
    described = {**raw, "quantization_config": encoding.quantization_config(layouts, embeddings, tied)}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _quality(
    directory: Path,
    out: Path,
    config: QuantizationConfig,
    kept: Sequence[list[int]],
    tokenizer: str | Path | None,
    progress: bool,
    adapter: str | Path | None,
) -> tuple[Quality | None, str | None]:
    """Returns the comparison with bfloat16, or None and the reason why there is none."""
    try:
        return compare_models(directory, out, config, kept, tokenizer, progress, adapter), None
    except MemoryError as error:  # calibration needs one layer in memory, comparison two models
        logger.warning("%s is written and whole, but could not be compared with bfloat16: %s", out, error)
        return None, str(error) or "there is too little memory for two models"


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A temporary directory next to `out`. It is renamed to `out` at the end of the block, or removed after an
    exception."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        os.rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _copy_small_files(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        is_small = path.name.endswith(COPIED) and not path.name.endswith(".index.json") and path.name != "config.json"
        if path.is_file() and (is_small or path.name.upper().startswith(("LICENSE", "NOTICE"))):
            shutil.copyfile(path, target / path.name)


def _copy_modules(source: Path, target: Path) -> None:
    """Copies the modules of sentence-transformers that have a folder of their own, such as pooling."""
    if not (source / MODULES_FILE).is_file():
        return
    for module in json.loads((source / MODULES_FILE).read_text(encoding="utf-8")):
        if (where := module.get("path")) and (folder := file_inside(source, where, MODULES_FILE)).is_dir():
            shutil.copytree(folder, target / where)
