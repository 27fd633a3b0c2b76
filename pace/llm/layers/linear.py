"""Matrix products: one weight, filled from one or several tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pace.llm.layers.base import Layer, Vectors
from pace.llm.layers.norm import RMSNorm
from pace.llm.layers.weight_target import Piece, RowRange, TensorSource, WeightTarget
from pace.ops.experts import Activation
from pace.ops.protocol import ForwardOps, Weight, WeightOps
from pace.ops.weight_layout import AnyLayout, MixedLayout, WeightLayout, layout_of_rows
from pace.quant import Format

COLUMNS = 16
"""Columns of the zeros of an `AddedVector`."""


class OutOfRange(ValueError):
    """A finite weight of the checkpoint would be infinite in the dtype of the model."""


@dataclass(frozen=True)
class WeightPlan:
    """How one matrix is stored, and how its rows are converted."""

    layouts: Mapping[str, WeightLayout] = field(default_factory=dict)
    """Layouts of the parts that are stored quantised; other parts are floats in the model's dtype."""
    formats: Mapping[str, Format] = field(default_factory=dict)
    """Formats of the parts whose tensors hold floats to be quantised."""
    order: Tensor | None = None
    """Order of the columns, as in `QuantizedRows`."""

    def prepare(self, ops: WeightOps, rows: Piece, part: str) -> Piece:
        """Converts rows of a part to the weight's format. Raises a ValueError that names the tensor for floats that
        cannot be quantised."""
        if part in self.formats:
            rows = ops.quantize(rows, self.formats[part], f"{part}.weight")
        return rows if isinstance(rows, Tensor) or part in self.layouts else rows.dequantize()


class Linear(Layer):
    """Matrix product `residual + activation(x [T, K] W' + b)`, `W [N, K]`.

    `parts` maps prefixes in the checkpoint to numbers of rows, from the top of W down.
    `{"...q_proj": 64, "...k_proj": 32}` fuses two tensors into one product, `{"...qkv_proj": 96}` takes one tensor as
    it is. A `TensorSource` in place of a number locates a part that is some rows of a tensor. With `bias`, every part
    has a bias, except the last ones that are `unbiased`."""

    glu = False
    keeps_floats = False
    """True if no QuantizationConfig quantises it."""
    takes_codes = True
    """True if a checkpoint's codes are kept; else they are dequantised."""

    def __init__(
        self, parts: Mapping[str, int | TensorSource], k: int, bias: bool = False, unbiased: Collection[str] = ()
    ):
        self.sources = {name: part for name, part in parts.items() if isinstance(part, TensorSource)}
        self.parts = {name: part.num_rows if isinstance(part, TensorSource) else part for name, part in parts.items()}
        self.k = k
        of_biases = {f"{name}.bias": source.of_bias() for name, source in self.sources.items()}
        biased = {f"{name}.bias": rows for name, rows in self.parts.items() if bias and name not in unbiased}
        self.bias = Vectors(biased, of_biases, num_zeros=sum(self.parts[name] for name in unbiased))
        self.plan = WeightPlan()
        """May be changed until `allocate`."""
        self.weight = None
        self.in_file: Weight | None = None
        """A weight that needs no memory because it is in a file. May be set until `allocate`."""
        self._ops = None

    def choose_whole(
        self, tensors: Mapping[str, tuple[int, ...]], name: str, order: Sequence[str] | None = None
    ) -> None:
        """Takes all parts from rows of `{name}.weight`, if it is one of a checkpoint's tensors. They have this `order`
        there, by default that of the parts. Before `allocate`."""
        if f"{name}.weight" not in tensors:
            return
        first = 0
        for part in order or self.parts:
            rows = RowRange(first, self.parts[part])
            self.sources[part] = TensorSource((self.n, self.k), (rows,), f"{name}.weight", f"{name}.bias")
            first += rows.count
        self.bias.sources = {f"{part}.bias": source.of_bias() for part, source in self.sources.items()}

    def with_part(self, name: str, num_rows: int) -> Linear:
        """Returns a product with one more part, the last one, without a bias. Before `allocate`."""
        parts = {**self.parts, **self.sources, name: num_rows}
        unbiased = [part for part in parts if f"{part}.bias" not in self.bias.lengths]
        return Linear(parts, self.k, bool(self.bias.lengths), unbiased)

    def __call__(
        self, ops: ForwardOps, x: Tensor, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return ops.linear(x, self.weight, self.bias.values, activation, residual)

    def targets(self) -> dict[str, list[WeightTarget]]:
        targets, row = super().targets(), 0
        for name, rows in self.parts.items():
            source = self.sources.get(name) or TensorSource((rows, self.k))
            found = source.targets(lambda piece, row, name=name: self._fill(piece, name, row), row)
            targets.setdefault(self.tensor(name), []).extend(found)
            row += rows
        return targets

    def tensor(self, part: str) -> str:
        """The name of the tensor that holds a part."""
        return (part in self.sources and self.sources[part].tensor) or f"{part}.weight"

    def tensors(self) -> set[str]:
        """The names of the tensors that hold its matrix."""
        return {self.tensor(part) for part in self.parts}

    def allocate(self, ops: WeightOps, dtype: torch.dtype) -> None:
        super().allocate(ops, dtype)
        empty = self.in_file or ops.empty_weight(self.n, self.k, self.storage(dtype), self.glu, self.plan.order)
        self.hold(ops, empty)

    def hold(self, ops: WeightOps, weight: Weight, bias: Tensor | None = None) -> None:
        """Uses a weight, and a bias, as its own."""
        self._ops = ops
        self.weight = weight
        if bias is not None:
            self.bias.values = bias

    def planned_nbytes(self, ops: WeightOps, dtype: torch.dtype) -> int:
        return super().planned_nbytes(ops, dtype) + self.matrix_nbytes(ops, dtype)

    def matrix_nbytes(self, ops: WeightOps, dtype: torch.dtype) -> int:
        """Bytes of the matrix, without biases."""
        return ops.weight_nbytes(self.n, self.k, self.storage(dtype), self.glu)

    def storage(self, dtype: torch.dtype) -> AnyLayout:
        """The weight's layout; `dtype` is the dtype of floats."""
        merged: list[tuple[int, torch.dtype | WeightLayout]] = []
        for part, rows in self.parts.items():
            layout = self.plan.layouts.get(part, dtype)
            if merged and merged[-1][1] == layout:
                rows += merged.pop()[0]
            merged.append((rows, layout))
        return MixedLayout(tuple(merged)) if len(merged) > 1 else merged[0][1]

    def _fill(self, source: Piece, part: str, row: int) -> None:
        rows = self.plan.prepare(self._ops, source, part)
        if isinstance(rows, Tensor):
            check_range(rows, layout_of_rows(self.weight.layout, row, rows.shape[0]), f"{part}.weight")
            self._ops.pack_rows_(self.weight, rows, row)
        else:
            self._ops.pack_quantized_(self.weight, rows, row)

    @property
    def n(self) -> int:
        return sum(self.parts.values())

    def matrices(self) -> Iterator[Linear]:
        yield self

    @property
    def num_weights(self) -> int:
        return super().num_weights + self.n * self.k

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.weight is None else self.weight.nbytes)


class FloatLinear(Linear):
    """A product that no QuantizationConfig quantises, such as that of the decays of a state."""

    keeps_floats = True


class NormedLinear(Linear):
    """Matrix product `residual + activation(norm(x) W' + b)` of rows that nothing else reads."""

    def __init__(self, norm: RMSNorm, parts: Mapping[str, int], k: int, bias: bool = False):
        super().__init__(parts, k, bias)
        self.norm = norm

    def __call__(
        self, ops: ForwardOps, x: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return super().__call__(ops, self.norm(ops, x), activation, residual)


class GatedLinear(Linear):
    """Gated product `activation(x Wg' + bg) * (x Wu' + bu)`, `[T, N / 2]`; the rows of W are `[gate; up]`."""

    glu = True

    def __call__(self, ops: ForwardOps, x: Tensor, activation: str) -> Tensor:
        return ops.linear_glu(x, self.weight, activation, self.bias.values)


class AddedVector(Layer):
    """`y + v` for a vector v of the checkpoint.

    The operations have no such sum, so v is the bias of a product with a few columns of zeros."""

    def __init__(self, name: str, size: int):
        """`name`: the vector's tensor."""
        self.size = size
        self.vector = Vectors({name: size})
        self.weight: Weight | None = None

    def drop(self) -> None:
        """Adds nothing, for a checkpoint without the vector. Before `allocate`."""
        self.vector = Vectors({})

    def allocate(self, ops: WeightOps, dtype: torch.dtype) -> None:
        super().allocate(ops, dtype)
        if self.vector.lengths:
            zeros = torch.zeros(self.size, min(self.size, COLUMNS))
            self.weight = ops.empty_weight(*zeros.shape, torch.promote_types(dtype, torch.float32))
            ops.pack_rows_(self.weight, zeros, 0)

    def __call__(self, ops: ForwardOps, y: Tensor) -> Tensor:
        if self.weight is None:
            return y
        return ops.linear(y[:, : self.weight.k], self.weight, self.vector.values, None, y)


def check_range(source: Tensor, dtype: torch.dtype, tensor: str) -> None:
    """Raises OutOfRange if `dtype` would turn a finite weight into infinity; infinite and NaN weights are accepted.
    This can only happen for float16, and for float64 sources."""
    narrower = source.dtype != dtype and (dtype == torch.float16 or source.dtype == torch.float64)
    if not narrower or source.numel() == 0:
        return
    limit = torch.finfo(dtype).max
    low, high = source.aminmax()
    if low >= -limit and high <= limit:  # false if there is a NaN
        return
    finite = source[source.isfinite()].abs()
    if finite.numel() and finite.max() > limit:
        advice = "; load with dtype=bfloat16 or float32" if dtype == torch.float16 else ""
        raise OutOfRange(
            f"{tensor} reaches {finite.max():.4g}, which {str(dtype)[6:]} (at most {limit:.5g}) cannot hold{advice}"
        )
