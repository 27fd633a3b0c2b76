"""Files mapped to be read only. Such pages are nobody's memory: the system counts them neither against what a process
may take nor against what it has promised, so that a file may be larger than memory, and drops them when it needs room."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

from pace.checkpoints.files import PAGE_BYTES


class Mapping:
    """All of an open file, of one byte or more; the descriptor may be closed. Tensors keep the mapping alive."""

    def __init__(self, descriptor: int, num_bytes: int):
        self.data = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_READ)
        self.address = address_of(self.data)
        # torch warns of memory that may not be written, and has no way to be told.
        self._bytes = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        self._bytes.owner = self.data

    def tensor(self, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        """A view of `count` elements, one or more, from a byte of the file on. Who writes to it ends the process."""
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=offset)

    def release(self, begin: int, num_bytes: int) -> None:
        """Drops the pages of a range from this process's memory; a later access reads them again."""
        first_page = begin - begin % PAGE_BYTES
        self.data.madvise(mmap.MADV_DONTNEED, first_page, begin + num_bytes - first_page)


def address_of(data: mmap.mmap) -> int:
    """Where a mapping begins."""
    return np.frombuffer(data, np.uint8).ctypes.data
