"""`AdapterTable`: the LoRA adapters of one product of the base model, by slot. `EmbeddingAdapters`: those of an
embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pace.ops.file_table import RowTable
from pace.ops.weight import DTYPE_CODES

if TYPE_CHECKING:
    from pace.batch import ForwardBatch
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


class EmbeddingAdapters:
    """The adapters of an embedding `[num_rows, n]`, by slot: token t gets `scale * B A[:, t]` added to its row.

    A token's columns of A are looked up side by side, those of slot s from column `s * max_rank` on (`AdapterRows`).
    `products` multiplies them by B."""

    def __init__(self, num_rows: int, n: int, num_slots: int, max_rank: int, dtype: torch.dtype):
        self.num_rows = num_rows
        self.max_rank = max_rank
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.width = num_slots * max_rank
        self.products = AdapterTable(self.width, [n], num_slots, max_rank, dtype)
        self.columns: list[Tensor | None] = [None] * num_slots
        """A' `[num_rows, r]` of each slot."""

    @property
    def nbytes(self) -> int:
        return self.products.nbytes + sum(columns.nbytes for columns in self.columns if columns is not None)

    def selector(self, slot: int, rank: int) -> Tensor:
        """Returns the matrix `[rank, width]` that takes the columns of a slot."""
        found = torch.zeros(rank, self.width)
        found[:, slot * self.max_rank :].fill_diagonal_(1.0)
        return found

    def put(self, slot: int, columns: Tensor, matrices: AdapterMatrices) -> None:
        """Fills a slot: A' `[num_rows, r]`, then the packed `selector`, and B. Raises ValueError for matrices that do
        not fit."""
        self.products.put(slot, matrices)
        self.columns[slot] = columns

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self.products.clear(slot)
        self.columns[slot] = None


class AdapterRows(RowTable):
    """The columns of A that the tokens of a step need, `[T, width]`; zeros for adapters that they do not have."""

    def __init__(self, adapters: EmbeddingAdapters, routing: Tensor):
        """`routing`: that of the step."""
        self.adapters = adapters
        self.routing = routing
        self.k = adapters.width

    def rows(self, ids: Tensor) -> Tensor:
        adapters, slots = self.adapters, self.routing[:, : self.routing.shape[1] // 2]
        found = torch.zeros(len(ids), self.k, dtype=adapters.dtype)
        for slot in slots.unique().long().tolist():
            columns = adapters.columns[slot] if slot >= 0 else None
            if columns is not None:
                of_slot = (slots == slot).any(1).nonzero().flatten()
                first = slot * adapters.max_rank
                found[of_slot, first : first + columns.shape[1]] = columns[ids[of_slot]].to(found.dtype)
        return found

    def of_step(self, batch: ForwardBatch) -> AdapterRows:
        return AdapterRows(self.adapters, batch.routing)


def _address(weight: Weight) -> int:
    """The address of a packed weight; 0 for one of the reference."""
    return getattr(weight, "address", 0)
