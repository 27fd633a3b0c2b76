"""LoRA adapters on the C++ kernels: their matrices in memory of their own, and what they add to a product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pace import _C
from pace.memory import reserve
from pace.ops.adapters import AdapterTable
from pace.ops.checks import check_rows, describe
from pace.ops.weight import CACHE_LINE, PackedWeight, Room, pack_rows_, weight_nbytes


def pack_matrices(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[PackedWeight]:
    sizes = [-(-weight_nbytes(*matrix.shape, dtype) // CACHE_LINE) * CACHE_LINE for matrix in matrices]
    memory = torch.frombuffer(reserve(max(sum(sizes), CACHE_LINE), huge_pages=True), dtype=torch.uint8)
    room, packed = Room(memory.data_ptr(), memory), []
    for matrix, size in zip(matrices, sizes):
        weight = PackedWeight(*matrix.shape, dtype, room=room)
        pack_rows_(weight, matrix, 0)
        packed.append(weight)
        room = room.at(size)
    return packed


def add_adapters_(y: Tensor, x: Tensor, adapters: AdapterTable, routing: Tensor) -> None:
    """Numerics: two products as in `linear`; `A x` is rounded to bf16 where x is."""
    (rows, columns), (others, k) = check_rows("y", y), check_rows("x", x)
    check_adapters(adapters, columns, k)
    if others != rows:
        raise ValueError(f"y has {rows} rows, x has {others}")
    found, width = check_rows("routing", routing)
    if found != rows or width < 2 or width % 2 or not routing.is_contiguous():
        raise ValueError(f"routing must be contiguous float32 [{rows}, 2 k]; got {describe(routing)}")
    _C.add_adapters(y, x, adapters, routing)


def check_adapters(adapters: AdapterTable, columns: int, k: int) -> None:
    """Raises ValueError unless the adapters belong to a product of `columns` columns of inputs of k elements."""
    if (adapters.num_columns, adapters.k) != (columns, k):
        raise ValueError(
            f"the adapters belong to a product [T, {adapters.num_columns}] of x [T, {adapters.k}]; got y of {columns} "
            f"columns and x of {k}"
        )
