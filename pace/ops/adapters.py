"""`AdapterTable`: the LoRA adapters of one product of the base model, by slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pace.ops.weight import DTYPE_CODES

if TYPE_CHECKING:
    from pace.ops.protocol import Weight


@dataclass(frozen=True, eq=False)
class AdapterPart:
    """What an adapter adds to one part of a product: `scale * (B t + bias)`, for its own elements t of `A x`."""

    b: Weight
    """B `[columns of the part, r]`."""
    bias: Tensor | None
    """float32 `[columns of the part]`."""
    scale: float

    @property
    def nbytes(self) -> int:
        return self.b.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class AdapterMatrices:
    """An adapter's matrices for one product."""

    a: Weight
    """A `[R, K]`: r rows for each part that has matrices, from the first part on."""
    parts: tuple[AdapterPart | None, ...]
    """None for a part that the adapter leaves alone."""

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + sum(part.nbytes for part in self.parts if part is not None)


class AdapterTable:
    """The adapters of one product `[T, N]` of `x [T, K]`, by slot. The columns are cut into parts, such as queries,
    keys and values. An adapter has matrices of its own for some of them.

    Kernels and recorded programs read the table in each step. So a slot is changed between two steps, and the program
    stays as it is."""

    def __init__(self, k: int, columns: Sequence[int], num_slots: int, max_rank: int, dtype: torch.dtype):
        """`columns`: the columns of each part. `max_rank`: of each part. `dtype`: of the matrices."""
        self.k = k
        self.num_columns = sum(columns)
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.dtype_code = DTYPE_CODES.get(dtype, -1)
        """Number of DType in csrc/include/pace/types.h; -1 for a dtype of the reference only."""
        self.slots: list[AdapterMatrices | None] = [None] * num_slots
        self.starts = torch.tensor([0, *accumulate(columns)])
        """int64 `[parts + 1]`: the first column of each part, and the end of the last one."""
        self.addresses = torch.zeros(num_slots, 1 + 2 * len(columns), dtype=torch.int64)
        """The address of A, then those of B and the bias of each part; 0 for none (csrc/include/pace/adapter_ops.h)."""
        self.scales = torch.zeros(num_slots, len(columns))

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and biases."""
        return sum(matrices.nbytes for matrices in self.slots if matrices is not None)

    def put(self, slot: int, matrices: AdapterMatrices) -> None:
        """Fills a slot. Raises ValueError for matrices that do not fit the product."""
        ranks, columns = 0, self.starts.diff().tolist()
        if len(matrices.parts) != len(columns) or matrices.a.k != self.k:
            raise ValueError(
                f"an adapter of this product has A [R, {self.k}] and {len(columns)} parts; got [{matrices.a.n}, "
                f"{matrices.a.k}] and {len(matrices.parts)}"
            )
        for part, count in zip(matrices.parts, columns):
            if part is not None and not (part.b.n == count and part.b.k <= self.max_rank):
                raise ValueError(
                    f"B of this part is [{count}, r], r at most {self.max_rank}; got [{part.b.n}, {part.b.k}]"
                )
            ranks += 0 if part is None else part.b.k
        if matrices.a.n != ranks:
            raise ValueError(f"the parts have {ranks} ranks together, but A has {matrices.a.n} rows")
        self.slots[slot] = matrices
        addresses = [_address(matrices.a)]
        for part in matrices.parts:
            bias = None if part is None else part.bias
            addresses += [0 if part is None else _address(part.b), 0 if bias is None else bias.data_ptr()]
        self.addresses[slot] = torch.tensor(addresses)
        self.scales[slot] = torch.tensor([0.0 if part is None else part.scale for part in matrices.parts])

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self.slots[slot] = None
        self.addresses[slot] = 0

    def converted(self, convert: Callable[[Weight], Weight]) -> AdapterTable:
        """Returns a table with converted matrices."""
        table = AdapterTable(self.k, self.starts.diff().tolist(), self.num_slots, self.max_rank, self.dtype)
        for slot, matrices in enumerate(self.slots):
            if matrices is not None:
                parts = [part and replace(part, b=convert(part.b)) for part in matrices.parts]
                table.put(slot, AdapterMatrices(convert(matrices.a), tuple(parts)))
        return table


def _address(weight: Weight) -> int:
    """The address of a packed weight; 0 for one of the reference."""
    return getattr(weight, "address", 0)
