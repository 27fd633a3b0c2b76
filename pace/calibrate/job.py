"""Quantises one checkpoint, decoder layer by decoder layer in fp32: `Job`.

A layer is loaded and its channel scales are migrated. Its products are then rounded one by one, using statistics of
their inputs. The layer is written, and the text runs through its rounded weights. At most one layer is in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from pace.calibrate import migration
from pace.calibrate.method import Method, check_formats
from pace.calibrate.parts import Parts
from pace.calibrate.recording import BATCH_TOKENS, CalibrationText, InputStatistics
from pace.calibrate.rounding import fit_scales, gptq, importance, round_to_nearest
from pace.calibrate.writing import Output
from pace.checkpoints.reader import CheckpointReader
from pace.llm.adapters.merge import MergedReader
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.layers import Embedding, Layer, Linear, LMHead, SplitLMHead
from pace.llm.layers.base import Vectors
from pace.llm.loading.fill import fill_targets, open_table
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.encoders.encoder import Encoder
from pace.llm.models.head_cost import head_cost
from pace.memory import available_memory_bytes, format_bytes
from pace.ops import native, reference
from pace.ops.weight_layout import QuantizedRows
from pace.quant import QuantizationConfig

logger = logging.getLogger("pace")

GPTQ_BYTES = 44
"""Bytes per pair of inputs of a product: the float32 Hessian and the five float64 matrices that `rounding.gptq` holds
at once. LAPACK copies some of these: 60 bytes were measured."""

HESSIANS_BYTES = 1 << 30
"""Limit for the Hessians of one layer's experts that are summed at a time. A single larger Hessian is still allowed."""

WORK = 6
"""Working memory of rounding, in units of the largest product in float32. Measured as 4 to 7, with layers 1024 and 1536
wide and all methods. The inputs and outputs of a step's products are counted separately."""


class Job:
    """Quantises one checkpoint into `folder`."""

    def __init__(
        self,
        model: BaseModelForCausalLM | Encoder,
        reader: CheckpointReader,
        config: QuantizationConfig,
        method: Method,
        folder: Path,
        num_tokens: int,
        adapter: AdapterWeights | None = None,
    ):
        """`adapter` is merged into the matrices before they are rounded. Raises the errors of `MergedReader`."""
        stored = reader.tensors
        self.model, self.method = model, method
        self.reader = reader if adapter is None else MergedReader(reader, model, adapter)
        reader = self.reader
        self.parts = Parts(model, reader)
        _check_one_matrix(model, config)
        self.formats = self.parts.formats(model, config)
        model.quantize(config)
        self.head = None if isinstance(model, Encoder) else head_cost(model, native, torch.bfloat16)
        model.quantize(None)
        if not self.formats:
            raise ValueError("everything is left as floats; there is nothing to quantise")
        check_formats(self.formats.values())
        matrices = list(model.matrices())
        self.layouts = {
            part: self.formats[part].layout if part in self.formats else None
            for matrix in matrices
            for part, _ in self.parts.of(matrix)
        }
        self.outside = [child for child in model.children() if child not in model.layers]
        self.front = [child for child in self.outside if not isinstance(child, LMHead)]
        self.embeddings = {part for matrix in matrices if isinstance(matrix, Embedding) for part in matrix.parts}
        self.met_few: list[str] = []
        """The experts' matrices that read too few rows to calibrate on."""
        self.check_memory(num_tokens)
        self.output = Output(folder, model, reader, self.parts, self.layouts, method, stored)

    def check_memory(self, num_tokens: int) -> None:
        """Raises MemoryError if less memory is available than a text of `num_tokens` tokens is sure to need. Warns if
        less is available than it is likely to need."""
        hidden = {}
        if not isinstance(self.model, Encoder):
            hidden = {f"the hidden states of {num_tokens} tokens": 4 * self.model.hidden_elements * num_tokens}
        embedding = {
            "the embedding": sum(child.planned_nbytes(reference, self.stored_dtype(child)) for child in self.front)
            if num_tokens
            else 0
        }
        parts = hidden | max([embedding, *map(self.bytes_of, self.model.layers)], key=lambda parts: sum(parts.values()))
        needed, available = sum(parts.values()), available_memory_bytes()
        widths = max(self.widths(layer) for layer in self.model.layers)
        largest = max(product.n * product.k for layer in self.model.layers for product in layer.matrices())
        likely = needed + 4 * (WORK * largest + min(num_tokens, BATCH_TOKENS) * widths)
        if likely <= available:
            return
        sizes = ", ".join(f"{part} {format_bytes(size)}" for part, size in parts.items() if size)
        taken = (
            f"quantising takes {format_bytes(needed)} of memory at least ({sizes}), probably {format_bytes(likely)}, "
            f"and {format_bytes(available)} are available"
        )
        advice = "calibrate on fewer tokens (max_tokens), or " if num_tokens else ""
        advice += "without GPTQ (method='awq' or 'smoothquant'), or " if self.method.rounding == "gptq" else ""
        if needed > available:
            raise MemoryError(f"{taken}; {advice}free some memory")
        logger.warning("%s; should the system end the process, %sfree some memory", taken, advice)

    def widths(self, layer: Layer) -> int:
        """Elements that the layer's products read and write per token. Of the experts of a stack, one works at a
        time."""
        products = {id(self.parts.mixtures.get(id(product), (0, product))[1]): product for product in layer.matrices()}
        return sum(product.n + product.k for product in products.values())

    def bytes_of(self, layer: Layer) -> dict[str, int]:
        """Lower bound of the memory held while the layer is quantised."""
        found = {"a decoder layer in float32": layer.planned_nbytes(reference, torch.float32)}
        if self.method.rounding == "gptq":
            groups = self.together(self.quantised_products(layer))
            needs = [GPTQ_BYTES * group[0].k ** 2 + hessians_bytes(group[1:]) for group in groups]
            found["GPTQ of its widest product"] = max(needs, default=0)
        return found

    def quantised_products(self, layer: Layer) -> list[Linear]:
        return [
            product for product in layer.matrices() if any(part in self.formats for part, _ in self.parts.of(product))
        ]

    def together(self, products: Sequence[Linear]) -> Iterator[list[Linear]]:
        """Groups the products in their order. Experts of one stack are grouped up to HESSIANS_BYTES; any other product
        is its own group."""
        for _, group in groupby(products, lambda product: id(self.parts.mixtures.get(id(product), (0, product))[1])):
            alike = list(group)
            step = max(1, HESSIANS_BYTES // hessians_bytes(alike[:1]))
            for start in range(0, len(alike), step):
                yield alike[start : start + step]

    def run(self, seen: Sequence[list[int]], progress: Callable[[int], object]) -> None:
        model, text = self.model, None
        with self.output.writer, torch.no_grad():
            self.output.copy_apart()
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
        known: dict[int, InputStatistics] = {}
        if self.method.migration:
            known = self.migrate(layer, text, self.method.migration)
        for group in self.together(self.quantised_products(layer)):
            if self.method.rounding == "gptq":
                known = record(text, layer, [*group, *self.read_by_all(group)], with_hessian=True)
            for product in group:
                inputs = self.inputs_of(product, known) if self.method.is_calibrated else None
                for part, rows in self.parts.of(product):
                    if part in self.formats:
                        self.quantize_part(product, part, rows, inputs)
        if text:
            text.advance(layer)
        self.output.floats(layer)

    def migrate(self, layer: Layer, text: CalibrationText, kind: str) -> dict[int, InputStatistics]:
        """Migrates channel scales of the layer if that reduces the error. Returns the input statistics of the products
        afterwards."""
        known = record(text, layer, [p for p in layer.matrices() if id(p) not in self.parts.heads], with_hessian=False)
        for place in migration.migrations(layer):
            inputs = known[id(place.readers[0])]
            if id(place.readers[0]) in self.parts.mixtures and not inputs.are_enough:
                continue
            quantised = [
                [(rows, self.layouts[part]) for part, rows in self.parts.of(reader) if part in self.formats]
                for reader in place.readers
            ]
            s = migration.choose(place, kind, inputs, quantised)
            if s is not None:
                migration.apply(place, s)
                for reader in place.readers:
                    known[id(reader)].rescale(1 / s)
        return known

    def read_by_all(self, group: Sequence[Linear]) -> list[Linear]:
        """The router, which reads all rows that gate and up of an expert may read. Empty for other products, and for
        experts that read something else than the router."""
        mixture, _ = self.parts.mixtures.get(id(group[0]), (None, None))
        return [mixture.gate] if mixture and any(reader is group[0] for reader in mixture.readers) else []

    def inputs_of(self, product: Linear, known: dict[int, InputStatistics]) -> InputStatistics:
        """Returns the statistics that a product is rounded with. If an expert has too few rows, gate and up use the
        rows of all experts. Down then uses no statistics, so all its weights count equally."""
        inputs = known[id(product)]
        if id(product) not in self.parts.mixtures or inputs.are_enough:
            return inputs
        self.met_few += [self.output.module(part) for part, _ in self.parts.of(product) if part in self.formats]
        for router in self.read_by_all([product]):
            return known[id(router)]
        return InputStatistics(product.k, 0, with_hessian=False)

    def quantize_part(self, product: Linear, part: str, rows: slice | Tensor, inputs: InputStatistics | None) -> None:
        weight, layout = product.weight.matrix[rows], self.layouts[part]
        if inputs is None:
            rounded = self.as_at_load(part, weight)
        else:
            scales = fit_scales(weight, layout, importance(inputs.squares))
            if self.method.rounding == "gptq" and inputs.hessian is not None:
                rounded = gptq(weight, layout, scales, inputs.hessian, self.method.act_order)
            else:
                rounded = round_to_nearest(weight, layout, scales)
        self.output.codes(part, rounded)
        product.weight.matrix[rows] = rounded.dequantize()

    def as_at_load(self, module: str, rows: Tensor) -> QuantizedRows:
        """Rounds without input statistics: the same codes and scales as `LLMModel(quantization=...)`."""
        return native.quantize(rows, self.formats[module], f"{module}.weight").unpaired()

    # -- reading and writing -------------------------------------------------------------------------------------------

    def load(self, layer: Layer, dtype: torch.dtype) -> None:
        """Loads a layer's weights as floats."""
        layer.allocate(reference, dtype)
        targets = {self.parts.sources[name]: found for name, found in layer.targets().items()}
        for table in layer.tables():
            table.table = open_table(reference, self.reader, self.parts.sources[table.name])
            del targets[self.parts.sources[table.name]]
        fill_targets(self.reader, targets, 1, lambda num_bytes: None)
        for product in layer.matrices():
            if not product.weight.matrix.isfinite().all():
                raise ValueError(f"{next(iter(product.parts))}.weight holds NaN or infinity, which cannot be quantised")

    def stored_dtype(self, layer: Layer) -> torch.dtype:
        sources = (self.parts.sources[name] for name in layer.targets())
        return next((self.reader.tensors[source].dtype for source in sources), torch.float32)

    def copy(self, layer: Layer) -> None:
        """Writes a layer's tensors unchanged, or quantised as at load if they have a format."""
        for name in layer.targets():
            module = name.removesuffix(".weight")
            if module not in self.formats:
                self.output.copy(name)
                continue
            for start, piece in self.output.pieces(name):
                self.output.codes(module, self.as_at_load(module, piece), start)


def record(
    text: CalibrationText, layer: Layer, products: Sequence[Linear], with_hessian: bool
) -> dict[int, InputStatistics]:
    """Input statistics of a layer's products, by id of the product."""
    return dict(zip(map(id, products), text.record(layer, products, with_hessian)))


def _check_one_matrix(model: BaseModelForCausalLM, config: QuantizationConfig) -> None:
    """Raises ValueError if an embedding that is also the LM head would be written in two formats."""
    model.quantize(config)
    is_split = isinstance(model.lm_head, SplitLMHead)
    model.quantize(None)
    if is_split:
        raise ValueError(
            "this model's embedding and LM head are one matrix, which is written once; give both the same format, or "
            "only one of lm_head and embedding. LLMModel(quantization=...) can hold it in two formats"
        )


def hessians_bytes(products: Sequence[Linear]) -> int:
    return sum(4 * product.k**2 for product in products)


def _unload(layer: Layer) -> None:
    for leaf in layer.walk():
        if isinstance(leaf, Vectors):
            leaf.values = None
        elif isinstance(leaf, Linear):
            leaf.weight = None
