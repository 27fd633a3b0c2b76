"""Matrix products: one weight, filled from one or several tensors of the checkpoint."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from pace.llm.layers.base import Layer, Slot, Vectors

class Linear(Layer):
    """`residual + activation(x [T, K] W' + b)`, `W [N, K]`.

    `parts` maps the checkpoint's prefixes to their numbers of rows, from the top of W down: `{"...q_proj": 64, "...k_proj": 32}`
    fuses two tensors into one product, `{"...qkv_proj": 96}` takes them as they come. With `bias`, every part has one."""

    glu = False

    def __init__(self, parts: dict[str, int], k: int, bias: bool = False):
        self.parts = parts
        self.k = k
        self.bias = Vectors({f"{name}.bias": rows for name, rows in parts.items()} if bias else {})
        self.weight = None
        self._ops = None

    def __call__(self, ops: ModuleType, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        return ops.linear(x, self.weight, self.bias.values, activation, residual)

    def slots(self) -> dict[str, Slot]:
        slots, row = super().slots(), 0
        for name, rows in self.parts.items():
            tensor = f"{name}.weight"
            slots[tensor] = Slot((rows, self.k), lambda source, start, tensor=tensor, row=row: self._fill(source, tensor, row + start))
            row += rows
        return slots

    def allocate(self, ops: ModuleType, dtype: torch.dtype) -> None:
        super().allocate(ops, dtype)
        self._ops = ops
        self.weight = ops.empty_weight(sum(self.parts.values()), self.k, dtype, self.glu)

    def planned_nbytes(self, ops: ModuleType, dtype: torch.dtype) -> int:
        return super().planned_nbytes(ops, dtype) + ops.weight_nbytes(sum(self.parts.values()), self.k, dtype, self.glu)

    def _fill(self, source: Tensor, tensor: str, row: int) -> None:
        check_range(source, self.weight.dtype, tensor)
        self._ops.pack_rows_(self.weight, source, row)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.weight is None else self.weight.nbytes)


class GatedLinear(Linear):
    """`activation(x Wg' + bg) * (x Wu' + bu)`, `[T, N / 2]`, where the rows of W are `[gate; up]`."""

    glu = True

    def __call__(self, ops: ModuleType, x: Tensor, activation: str) -> Tensor:
        return ops.linear_glu(x, self.weight, activation, self.bias.values)


def check_range(source: Tensor, dtype: torch.dtype, tensor: str) -> None:
    """Raises ValueError where `dtype` would turn a finite weight into infinity; those that are infinite or NaN stay so.
    Of the pairs of dtypes only float16 and, as source, float64 differ enough for that."""
    narrower = source.dtype != dtype and (dtype == torch.float16 or source.dtype == torch.float64)
    if not narrower or source.numel() == 0:
        return
    limit = torch.finfo(dtype).max
    low, high = source.aminmax()
    if low >= -limit and high <= limit:  # false where there is a NaN
        return
    finite = source[source.isfinite()].abs()
    if finite.numel() and finite.max() > limit:
        advice = "; load with dtype=bfloat16 or float32" if dtype == torch.float16 else ""
        raise ValueError(f"{tensor} reaches {finite.max():.4g}, which {str(dtype)[6:]} (at most {limit:.5g}) cannot hold{advice}")
