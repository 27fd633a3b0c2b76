"""LoRA adapters of `pace.ops.reference`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pace.ops.adapters import AdapterTable


def add_adapters(
    linear: Callable[[Tensor, Any, Tensor | None], Tensor],
    y: Tensor,
    x: Tensor,
    adapters: AdapterTable,
    routing: Tensor,
) -> None:
    """Computes `ForwardOps.add_adapters_`, given the product `linear(x, weight, bias)`."""
    per_row, starts = routing.shape[1] // 2, adapters.starts.tolist()
    for place in range(per_row):
        for slot in routing[:, place].unique().long().tolist():
            matrices = adapters.slots[slot] if slot >= 0 else None
            if matrices is None:
                continue
            rows = (routing[:, place] == slot).nonzero().flatten()
            weights = routing[rows, per_row + place][:, None].to(y.dtype)
            t, first = linear(x[rows], matrices.a, None), 0
            for part, start, end in zip(matrices.parts, starts, starts[1:]):
                if part is not None:
                    added = linear(t[:, first : first + part.b.k], part.b, part.bias)
                    y[rows, start:end] += weights * part.scale * added
                    first += part.b.k
