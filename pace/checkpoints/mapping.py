"""Read-only memory maps of files. The system does not count their pages towards a process's memory limit or committed
memory, and drops them when it needs room. A file may therefore be larger than memory."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

from pace.checkpoints.files import PAGE_BYTES


class Mapping:
    """Maps a whole open file of at least one byte. The descriptor may be closed. Tensors keep the mapping alive."""

    def __init__(self, descriptor: int, num_bytes: int):
        self.data = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_READ)
        self.address = address_of(self.data)
        # torch warns about a read-only buffer, and the warning cannot be disabled. A ctypes array at the same address
        # looks writable.
        self._bytes = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        self._bytes.owner = self.data

    def tensor(self, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        """A view of `count` elements (at least one) from byte `offset` of the file. Writing to it crashes the
        process."""
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=offset)

    def release(self, begin: int, num_bytes: int) -> None:
        """Drops the pages of a range from this process's memory; a later access reads them again."""
        first_page = begin - begin % PAGE_BYTES
        self.data.madvise(mmap.MADV_DONTNEED, first_page, begin + num_bytes - first_page)


def address_of(data: mmap.mmap) -> int:
    """Address at which a mapping begins."""
    return np.frombuffer(data, np.uint8).ctypes.data
