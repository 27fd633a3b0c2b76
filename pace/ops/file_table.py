"""`FileTable`: an embedding table that stays in its file, and is read row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pace.memory import ReusedPages

if TYPE_CHECKING:
    from pace.batch import ForwardBatch

OWN_PAGES_BYTES = 1 << 20
"""Minimum size of rows that get their own pages, reused by later lookups. New pages for 512 rows of Gemma 4 E2B took as
long as reading them."""


class RowTable:
    """Rows that Python looks up: `ForwardOps.embedding` takes one in place of a weight. A recorded program looks them
    up before a step."""

    k: int
    """Columns of a row."""

    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows `ids` (int64 `[T]`), floats `[T, k]`. Raises ValueError for an id outside of the table."""
        raise NotImplementedError

    def of_step(self, batch: ForwardBatch) -> RowTable:
        """Returns the table of a step, for a table that was recorded."""
        return self


class FileTable(RowTable):
    """A matrix `[n, k]` in a file. It has no memory: a lookup reads the rows that it returns.

    `nbytes` is the size in the file. Thread-safe if `read` is."""

    def __init__(self, n: int, k: int, nbytes: int, dtype: torch.dtype, read: Callable[[list[int], Tensor], None]):
        """`read(rows, out)` writes these rows to `out [len(rows), k]` in `dtype`, float32 or float64. There is at least
        one, and each is in `0..n - 1`."""
        self.n = n
        self.k = k
        self.nbytes = nbytes
        self.dtype = dtype
        self._read = read
        self._pages = ReusedPages()

    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows `ids` (int64 `[T]`), `[T, k]` in `dtype`. Raises ValueError for an id outside of the table, and
        for a damaged row."""
        out = self._empty(len(ids))
        if wanted := ids.tolist():
            if not 0 <= min(wanted) <= max(wanted) < self.n:
                raise ValueError(f"ids must be in 0..{self.n - 1}; got {min(wanted)}..{max(wanted)}")
            self._read(wanted, out)
        return out

    def _empty(self, rows: int) -> Tensor:
        num_bytes = rows * self.k * self.dtype.itemsize
        if num_bytes < OWN_PAGES_BYTES:
            return torch.empty(rows, self.k, dtype=self.dtype)
        memory = self._pages.take(num_bytes)
        return torch.frombuffer(memory, dtype=self.dtype, count=rows * self.k).view(rows, self.k)
