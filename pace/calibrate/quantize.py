"""A checkpoint of floats and a text in, a quantised checkpoint out: `quantize_checkpoint`.

Decoder layer by decoder layer, in fp32: load, migrate scales, round one product after the
other to what its inputs ask for, write, run the text through what became of the layer, and go on. No more than one
layer is in memory.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pace
from pace.calibrate import encoding, migration
from pace.calibrate.recording import BATCH_TOKENS, CalibrationText, InputStatistics
from pace.calibrate.report import Report, compare_models
from pace.calibrate.rounding import fit_scales, gptq, importance, round_to_nearest
from pace.checkpoints.gguf.file import is_gguf
from pace.checkpoints.reader import CheckpointReader
from pace.checkpoints.safetensors_file import TensorInfo
from pace.checkpoints.safetensors_writer import SafetensorsWriter
from pace.eval import encode, read_context, windows
from pace.llm.layers import Embedding, Layer, Linear, LMHead, TiedLMHead
from pace.llm.layers.base import Vectors
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.hf_utils import find_checkpoint, load_tokenizer, read_config_json
from pace.llm.models.model_utils import make_model, progress_bar, use_threads
from pace.memory import available_memory_bytes, format_bytes
from pace.ops import native, reference
from pace.ops.weight_layout import QuantizedRows
from pace.quant import Format, Int4, Int8, QuantizationConfig, read_quantization

logger = logging.getLogger("pace")

MAX_TOKENS = 32768
"""Of the text, where nobody says otherwise; twice as many gain little (arXiv 2210.17323 takes 262144, 2306.00978
less)."""

MIN_TOKENS = 256
"""A shorter text says too little of what channels are like."""

REPORT_SHARE, REPORT_TOKENS = 8, 8192
"""Every eighth window is kept from calibration for the report, up to so many tokens."""

CHARACTERS_A_TOKEN = 16
"""Of a text much longer than the tokens that are wanted, pieces are taken: tokenising 50 MB takes minutes and 7 GB.
Tokens have 3 to 6 characters, so that enough of them come."""

GPTQ_BYTES = 44
"""For each pair of inputs of a product: what it sums of the text in float32, and five matrices of float64 that
`rounding.gptq` has at a time. LAPACK has copies of some: 60 were measured."""

WORK = 6
"""What rounding takes besides, in the size of the largest product in float32, as measured with layers 1024 and 1536
wide and methods of all kinds (4 to 7), where what the products of a step read and give is told apart."""

COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Endings of the small files that make a checkpoint: tokenizer, chat template, generation config."""


@dataclass(frozen=True)
class Method:
    """How weights become codes: scales of channels migrated first (a name of `migration.KINDS`) or not, then rounded
    each to the nearest, or column by column (GPTQ)."""

    migration: str | None = None
    rounding: str = "rtn"
    act_order: bool = True

    @property
    def is_calibrated(self) -> bool:
        return self.migration is not None or self.rounding == "gptq"

    def __str__(self) -> str:
        return "+".join(filter(None, (self.migration, self.rounding)))


METHODS = ("rtn", "gptq", "awq", "smoothquant", "awq+gptq", "smoothquant+gptq")
DEFAULT_METHODS = {"int4": "awq+gptq", "int8": "smoothquant"}


def read_method(name: str, act_order: bool | None = None) -> Method:
    """`act_order`: None for True. Raises ValueError for an unknown name, and for an order of columns where the method
    has none."""
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; known are {', '.join(METHODS)}")
    first, _, second = name.partition("+")
    kind = first if first in migration.KINDS else None
    rounding = "gptq" if "gptq" in (first, second) else "rtn"
    if act_order is not None and rounding != "gptq":
        ordered = ", ".join(method for method in METHODS if "gptq" in method)
        raise ValueError(
            f"act_order={act_order} tells GPTQ which columns to round first, and the method {name} rounds all at once; leave it out, or take one of {ordered}"
        )
    return Method(kind, rounding, act_order is not False)


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
) -> Report:
    """Writes the directory `out`: the checkpoint with its matrices as int4 or int8, in the layout of
    compressed-tensors, for `LLMModel(out)`.

    `quantization`: "int4" or "int8", or a QuantizationConfig of these, as `LLMModel` takes it at load.
    `calibrate`: texts like those that the model is for. Not needed by the method "rtn" alone.
    `method`: "gptq" rounds column by column, so that later columns make up for earlier ones' errors (`act_order`: the
    most used first, unless it is False); "awq" and "smoothquant" scale channels first, where the layer before can undo
    it exactly, and then round to the nearest; "awq+gptq" and "smoothquant+gptq" do both; "rtn" does neither. Default:
    "awq+gptq" for int4, "smoothquant" for int8.
    `context`, `max_tokens`: the texts are read in windows of `context` tokens (default: 512, or what the model takes),
    `max_tokens` in all (default: 32768), evenly spread. Every eighth window is kept for the report.
    `report`: compare the result, and the same formats at load, with bfloat16 on that text; a warning where there is no
    memory for two models.

    The same arguments give the same file on the same machine. **Memory**: one decoder layer in float32, the text's
    hidden states (4 bytes for each token and channel), for GPTQ some 60 bytes for each pair of inputs of a product, and
    for the report two models.

    Raises ValueError or TypeError for arguments that make no sense or would have no effect, a text of fewer than 256
    tokens, formats other than int4 and int8, a checkpoint that is quantised already, and what `LLMModel` raises of a
    checkpoint; FileExistsError where `out` exists; before anything is read MemoryError where there is less memory than
    it takes in any case (a warning where there is less than it is likely to take), and OSError where the disk has no
    room for `out`. Nothing is left of `out` where it fails."""
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists already; give a new directory")
    config = read_quantization(quantization)
    if config is None:
        raise ValueError("say what the checkpoint is to become: quantization='int4' or 'int8'")
    _check_formats(config)
    chosen = read_method(method or DEFAULT_METHODS[config.format.name], act_order)
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < MIN_TOKENS):
        raise ValueError(f"max_tokens must be at least {MIN_TOKENS}; got {max_tokens!r}")
    if calibrate is None:
        _check_without_text(
            chosen, context=context, max_tokens=max_tokens, tokenizer_name_or_path=tokenizer_name_or_path
        )
    elif not chosen.is_calibrated:
        _check_text_of_report(chosen, report, max_tokens)
    use_threads(num_threads)
    hub = {
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "progress": progress,
    }
    directory = find_checkpoint(model_name_or_path, **hub)
    if is_gguf(directory):
        raise ValueError(
            f"{directory} is a GGUF file; calibrated are checkpoints as the Hub has them, with config.json and safetensors: give the model's original one"
        )
    raw = read_config_json(directory)
    model = make_model(directory, torch.float32, reference)
    if model.config.quantization_config is not None:
        raise ValueError(
            f"{directory} is quantised already, and quantising it again would lose twice; give the original checkpoint"
        )
    seen, kept = [], []
    if calibrate is not None:
        found = (
            directory
            if tokenizer_name_or_path is None
            else find_checkpoint(tokenizer_name_or_path, **hub | {"revision": None}, weights=False)
        )
        seen, kept = _windows(
            calibrate, load_tokenizer(found, model.vocab_size), model, context, max_tokens or MAX_TOKENS
        )
        if not chosen.is_calibrated:
            seen = []
    with CheckpointReader(directory) as reader, _new_directory(out) as folder:
        job = _Job(model, reader, config, chosen, folder, num_tokens=sum(map(len, seen)))
        with progress_bar(len(model.layers), f"Quantising {directory.name}", progress, unit="layer") as done:
            job.run(seen, done)
        _copy_small_files(directory, folder)
        described = {**raw, "quantization_config": encoding.quantization_config(job.layouts, job.embeddings, job.tied)}
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    quality = None
    if report and kept:
        try:
            quality = compare_models(directory, out, config, kept, tokenizer_name_or_path, progress)
        except MemoryError as error:  # calibration needs a layer's memory, and this two models'
            logger.warning("%s is written and whole, but could not be compared with bfloat16: %s", out, error)
    return Report(
        out=out,
        format=str(config.format),
        method=str(chosen),
        num_tokens=sum(map(len, seen)),
        bytes_before=reader.total_bytes,
        bytes_after=(out / "model.safetensors").stat().st_size,
        quality=quality,
    )


class _Job:
    """One checkpoint on its way to `folder`."""

    def __init__(
        self,
        model: BaseModelForCausalLM,
        reader: CheckpointReader,
        config: QuantizationConfig,
        method: Method,
        folder: Path,
        num_tokens: int,
    ):
        self.model, self.reader, self.method = model, reader, method
        names, slots = model.match_names(reader), model.slots()
        model.check_coverage(reader, names, slots)
        for name, found in slots.items():
            if not all(slot.is_plain for slot in found):
                raise NotImplementedError(
                    f"{name} holds the rows of several matrices, or their columns; pace quantize writes only matrices that have a tensor "
                    f"of their own. Load the checkpoint with quantization instead"
                )
        self.sources = {names[name]: name for name in reader.tensors if names[name] in slots}
        """Name in the model -> name in the checkpoint, of every tensor that is needed."""
        model.quantize(config)  # raises for patterns that match nothing
        matrices = list(model.matrices())
        self.formats: dict[str, Format] = {
            part: matrix.plan.formats[part]
            for matrix in matrices
            for part in matrix.parts
            if part in matrix.plan.formats
        }
        self.layouts = {
            part: self.formats[part].layout if part in self.formats else None
            for matrix in matrices
            for part in matrix.parts
        }
        if not self.formats:
            raise ValueError("everything is left as floats; there is nothing to quantise")
        _check_formats_of(self.formats)
        model.quantize(None)
        self.outside = [child for child in model.children() if child not in model.layers]
        self.front = [child for child in self.outside if not isinstance(child, LMHead)]
        self.embeddings = {part for matrix in matrices if isinstance(matrix, Embedding) for part in matrix.parts}
        self.tied = next(iter(model.lm_head.embedding.parts)) if isinstance(model.lm_head, TiedLMHead) else None
        """The embedding that is the LM head, too."""
        tensors: dict[str, TensorInfo] = {}
        self.inside = {name for layer in model.layers for name in layer.slots()}
        for name, source in self.sources.items():
            info, module = reader.tensors[source], name.removesuffix(".weight")
            if module in self.formats:
                tensors |= encoding.planned(module, info.shape, self.layouts[module], self.scale_dtype(name))
            else:
                # What a migration has divided is written as it was computed.
                scaled = method.migration is not None and name in self.inside and len(info.shape) == 1
                tensors[name] = TensorInfo(torch.float32, info.shape) if scaled else info
        if self.tied and encoding.shares_codes(self.layouts[self.tied]):
            tensors["lm_head.weight_scale"] = tensors[f"{self.tied}.weight_scale"]
        self.check_memory(num_tokens)
        self.writer = SafetensorsWriter(
            folder / "model.safetensors", tensors, {"quantized_by": f"pace {pace.__version__}, {method}"}
        )

    def check_memory(self, num_tokens: int) -> None:
        """Raises MemoryError where there is less than a text of so many tokens takes in any case; warns where there is
        less than it is likely to take."""
        hidden = {f"the hidden states of {num_tokens} tokens": 4 * self.model.config.hidden_size * num_tokens}
        embedding = {
            "the embedding": sum(child.planned_nbytes(reference, self.stored_dtype(child)) for child in self.front)
            if num_tokens
            else 0
        }
        parts = hidden | max([embedding, *map(self.bytes_of, self.model.layers)], key=lambda parts: sum(parts.values()))
        needed, available = sum(parts.values()), available_memory_bytes()
        widths = max(sum(product.n + product.k for product in layer.matrices()) for layer in self.model.layers)
        largest = max(product.n * product.k for layer in self.model.layers for product in layer.matrices())
        likely = needed + 4 * (WORK * largest + min(num_tokens, BATCH_TOKENS) * widths)
        if likely <= available:
            return
        least = f"{format_bytes(needed)} of memory at least ({', '.join(f'{part} {format_bytes(size)}' for part, size in parts.items() if size)})"
        taken = f"quantising takes {least}, {format_bytes(likely)} most likely, and {format_bytes(available)} are left"
        advice = "calibrate on fewer tokens (max_tokens), or " if num_tokens else ""
        advice += "without GPTQ (method='awq' or 'smoothquant'), or " if self.method.rounding == "gptq" else ""
        if needed > available:
            raise MemoryError(f"{taken}; {advice}free some memory")
        logger.warning("%s; should the system end the process, %sfree some memory", taken, advice)

    def bytes_of(self, layer: Layer) -> dict[str, int]:
        """What is in memory while the layer is quantised, at least."""
        found = {"a decoder layer in float32": layer.planned_nbytes(reference, torch.float32)}
        if self.method.rounding == "gptq":
            found["GPTQ of its widest product"] = (
                GPTQ_BYTES * max((product.k for product in self.quantised_products(layer)), default=0) ** 2
            )
        return found

    def quantised_products(self, layer: Layer) -> list[Linear]:
        return [product for product in layer.matrices() if any(part in self.formats for part in product.parts)]

    def run(self, seen: Sequence[list[int]], progress: Callable[[int], object]) -> None:
        model, text = self.model, None
        with self.writer, torch.no_grad():
            for child in self.outside:
                self.copy(child)
            if seen:
                for child in self.front:
                    self.load(child, self.stored_dtype(child))
                text = CalibrationText(model, seen)
                for child in self.front:
                    _unload(child)
            while model.layers:
                layer = model.layers.pop(0)
                self.load(layer, torch.float32)
                self.quantize_layer(layer, text)
                progress(1)

    # ----------------------------------------------------------------------------------------------------------- one
    # layer

    def quantize_layer(self, layer: Layer, text: CalibrationText | None) -> None:
        products = self.quantised_products(layer)
        known: dict[int, InputStatistics] = {}
        if self.method.migration:
            known = self.migrate(layer, text, self.method.migration)
        for product in products:
            inputs = known.get(id(product))
            if self.method.rounding == "gptq":
                [inputs] = text.record(layer, [product], with_hessian=True)
            for part, rows in part_rows(product):
                if part in self.formats:
                    self.quantize_part(product, part, rows, inputs)
        if text:
            text.advance(layer)
        self.write_floats(layer)

    def migrate(self, layer: Layer, text: CalibrationText, kind: str) -> dict[int, InputStatistics]:
        """Scales channels of the layer where that helps; returns the products' inputs as they are then."""
        products = list(layer.matrices())
        known = {
            id(product): inputs for product, inputs in zip(products, text.record(layer, products, with_hessian=False))
        }
        for place in migration.migrations(layer):
            quantised = [
                [(rows, self.layouts[part]) for part, rows in part_rows(reader) if part in self.formats]
                for reader in place.readers
            ]
            s = migration.choose(place, kind, known[id(place.readers[0])], quantised)
            if s is not None:
                migration.apply(place, s)
                for reader in place.readers:
                    known[id(reader)].rescale(1 / s)
        return known

    def quantize_part(self, product: Linear, part: str, rows: slice, inputs: InputStatistics | None) -> None:
        weight, layout = product.weight.matrix[rows], self.layouts[part]
        if inputs is None:
            rounded = self.as_at_load(part, weight)
        else:
            scales = fit_scales(weight, layout, importance(inputs.squares))
            if self.method.rounding == "gptq":
                rounded = gptq(weight, layout, scales, inputs.hessian, self.method.act_order)
            else:
                rounded = round_to_nearest(weight, layout, scales)
        self.write_rows(part, rounded)
        product.weight.matrix[rows] = rounded.dequantize()

    def as_at_load(self, module: str, rows: Tensor) -> QuantizedRows:
        """Without a look at inputs: the codes and scales that `LLMModel(quantization=...)` gives these rows."""
        return native.quantize(rows, self.formats[module], f"{module}.weight").unpaired()

    def scale_dtype(self, name: str) -> torch.dtype:
        """Of a tensor's scales: float32 where they are those of quantising at load or of whole rows; calibration knows
        of scales of groups that they will be bfloat16, half the bytes."""
        layout = self.layouts[name.removesuffix(".weight")]
        is_calibrated = self.method.is_calibrated and name in self.inside
        return torch.bfloat16 if is_calibrated and layout.group else torch.float32

    # -- reading and writing -------------------------------------------------------------------------------------------

    def load(self, layer: Layer, dtype: torch.dtype) -> None:
        """Gives a layer its weights, as floats."""
        layer.allocate(reference, dtype)
        for name, [slot] in layer.slots().items():
            for start, piece in self.pieces(name):
                slot.offer(piece, start)

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """First rows and rows of a tensor, all of it."""
        source = self.sources[name]
        for start, stop in self.reader.row_ranges(source):
            yield start, self.reader.read(source, start, stop)
            self.reader.release(source, start, stop)

    def stored_dtype(self, layer: Layer) -> torch.dtype:
        return next((self.reader.tensors[self.sources[name]].dtype for name in layer.slots()), torch.float32)

    def copy(self, layer: Layer) -> None:
        """Writes tensors as the checkpoint has them, and those of formats as quantising at load does."""
        for name in layer.slots():
            module = name.removesuffix(".weight")
            for start, piece in self.pieces(name):
                if module in self.formats:
                    self.write_rows(module, self.as_at_load(module, piece), start)
                else:
                    self.writer.write(name, piece, start)

    def write_rows(self, module: str, rows: QuantizedRows, start: int = 0) -> None:
        for name, part in encoding.encode(module, rows).items():
            if name.endswith(".weight_scale"):
                part = part.to(self.writer.tensors[name].dtype)
            self.writer.write(name, part, start)
            if name == f"{self.tied}.weight_scale" and "lm_head.weight_scale" in self.writer.tensors:
                self.writer.write("lm_head.weight_scale", part, start)
        shape = f"{module}.weight_shape"
        if start == 0 and shape in self.writer.tensors:
            self.writer.write(shape, torch.tensor(self.reader.tensors[self.sources[f"{module}.weight"]].shape))

    def write_floats(self, layer: Layer) -> None:
        """Of a loaded layer what was not written yet: vectors, and matrices that stay floats."""
        for leaf in _leaves(layer):
            if isinstance(leaf, Vectors):
                for name, values in leaf.stored():
                    self.writer.write(name, values.to(self.writer.tensors[name].dtype))
        for product in layer.matrices():
            for part, rows in part_rows(product):
                if part not in self.formats:
                    name = f"{part}.weight"
                    self.writer.write(name, product.weight.matrix[rows].to(self.writer.tensors[name].dtype))


def part_rows(product: Linear) -> Iterator[tuple[str, slice]]:
    """The parts of a product, and their rows."""
    start = 0
    for part, count in product.parts.items():
        yield part, slice(start, start + count)
        start += count


def _leaves(layer: Layer) -> Iterator[Layer]:
    yield layer
    for child in layer.children():
        yield from _leaves(child)


def _unload(layer: Layer) -> None:
    for leaf in _leaves(layer):
        if isinstance(leaf, Vectors):
            leaf.values = None
        elif isinstance(leaf, Linear):
            leaf.weight = None


def _check_formats(config: QuantizationConfig) -> None:
    chosen = [
        config.format,
        *(
            choice
            for choice in (config.embedding, config.lm_head, *config.overrides.values())
            if isinstance(choice, Format)
        ),
    ]
    _check_formats_of({format.name: format for format in chosen})


def _check_formats_of(formats: dict[str, Format]) -> None:
    for format in formats.values():
        if not isinstance(format, (Int4, Int8)):
            raise ValueError(
                f"int4 and int8 are calibrated and written; {format.name} needs no calibration: load the original with quantization={format.name!r}"
            )
        if isinstance(format, Int4) and not format.symmetric:
            raise ValueError(
                "zero points are not calibrated; leave int4 symmetric, or load the original with symmetric=False"
            )


def _check_without_text(method: Method, **of_text: Any) -> None:
    """Raises ValueError for a method that needs a text, and where something was said about reading one."""
    if method.is_calibrated:
        raise ValueError(f"the method {method} needs a text to calibrate on; give one (calibrate), or method='rtn'")
    if said := [name for name, value in of_text.items() if value is not None]:
        raise ValueError(
            f"{' and '.join(said)} would have no effect: there is no text to read; give one to calibrate on (calibrate), or leave this out"
        )


def _check_text_of_report(method: Method, report: bool, max_tokens: int | None) -> None:
    """Raises ValueError where a text for the report alone is too much, or too little is made of it."""
    if not report:
        raise ValueError(
            f"the text would have no effect: the method {method} looks at none, and the report is turned off (report=False); leave the text out, or take another method"
        )
    if max_tokens is not None:
        raise ValueError(
            f"max_tokens={max_tokens} would have no effect: the method {method} does not calibrate, and the report has its own share of the text; leave it out"
        )


def _windows(
    texts: Sequence[str], tokenizer: Any, model: BaseModelForCausalLM, context: int | None, max_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Windows to calibrate on, and those that are kept for the report. Raises ValueError for too few tokens."""
    context = read_context(context, model.max_position_embeddings)
    texts = _some(texts, CHARACTERS_A_TOKEN * max_tokens * REPORT_SHARE // (REPORT_SHARE - 1))
    found = list(windows(encode(texts, tokenizer, model.vocab_size), context))
    kept = found[REPORT_SHARE - 1 :: REPORT_SHARE]
    seen = [window for index, window in enumerate(found) if index % REPORT_SHARE != REPORT_SHARE - 1]
    if (count := sum(map(len, seen))) < MIN_TOKENS:
        raise ValueError(
            f"the text to calibrate on has {count} tokens; at least {MIN_TOKENS} are needed, and some thousands are better"
        )
    return _spread(seen, max_tokens), _spread(kept, REPORT_TOKENS)


def _some(texts: Sequence[Any], most: int) -> Sequence[Any]:
    """Texts, or rows of token ids, of about `most` characters in all: where there are more, pieces of them, evenly
    spread."""
    step, piece = -(-sum(map(len, texts)) // most), most // REPORT_SHARE
    if step <= 1:
        return texts
    return [text[start : start + piece] for text in texts for start in range(0, len(text), piece)][::step]


def _spread(found: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Windows of at most `max_tokens` in all, evenly spread."""
    step = -(-sum(map(len, found)) // max_tokens)
    return found[::step] if step > 1 else found


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out` at the end, and nothing where an exception ends the block."""
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
