"""`FileTable`: an embedding table that stays in its file, and is read row by row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class FileTable:
    """A matrix `[n, k]` in a file. It has no memory: a lookup reads the rows that it returns.

    `nbytes` is the size in the file. Thread-safe if `read` is."""

    def __init__(self, n: int, k: int, nbytes: int, read: Callable[[list[int]], Tensor]):
        """`read(rows)` returns these rows, float `[len(rows), k]`; each is in `0..n - 1`, and none comes twice."""
        self.n = n
        self.k = k
        self.nbytes = nbytes
        self._read = read

    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows `ids` (int64 `[T]`), float32 `[T, k]`, or float64 if they are stored so. Raises ValueError for
        an id outside of the table, and for a damaged row."""
        if len(ids) == 0:
            return torch.empty(0, self.k)
        distinct, places = ids.unique(return_inverse=True)
        wanted = distinct.tolist()
        if not 0 <= wanted[0] <= wanted[-1] < self.n:
            raise ValueError(f"ids must be in 0..{self.n - 1}; got {wanted[0]}..{wanted[-1]}")
        found = self._read(wanted)
        return found.to(torch.promote_types(found.dtype, torch.float32))[places]
