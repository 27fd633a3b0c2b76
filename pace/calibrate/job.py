"""One checkpoint on its way to codes, decoder layer by decoder layer in fp32: `Job`.

A layer is loaded, its scales are migrated, and its products are rounded one after the other to what their inputs ask
for. Then it is written, and the text runs through what became of it. No more than one layer is in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import pace
from pace.calibrate import encoding, migration
from pace.calibrate.method import Method, check_formats
from pace.calibrate.recording import BATCH_TOKENS, CalibrationText, InputStatistics
from pace.calibrate.rounding import fit_scales, gptq, importance, round_to_nearest
from pace.checkpoints.reader import CheckpointReader
from pace.checkpoints.safetensors_file import TensorInfo
from pace.checkpoints.safetensors_writer import SafetensorsWriter
from pace.llm.layers import Embedding, Layer, Linear, LMHead, TiedLMHead
from pace.llm.layers.base import Vectors
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.memory import available_memory_bytes, format_bytes
from pace.ops import native, reference
from pace.ops.weight_layout import QuantizedRows
from pace.quant import Format, QuantizationConfig

logger = logging.getLogger("pace")

GPTQ_BYTES = 44
"""For each pair of inputs of a product: what it sums of the text in float32, and five matrices of float64 that
`rounding.gptq` has at a time. LAPACK has copies of some: 60 were measured."""

WORK = 6
"""What rounding takes besides, in the size of the largest product in float32, as measured with layers 1024 and 1536
wide and methods of all kinds (4 to 7), where what the products of a step read and give is told apart."""


class Job:
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
        check_formats(self.formats.values())
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

    # -- one layer -----------------------------------------------------------------------------------------------------

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
