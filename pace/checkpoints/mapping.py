"""Read-only memory maps of files. The system does not count their pages towards a process's memory limit or committed
memory, and drops them when it needs room. A file may therefore be larger than memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pace.checkpoints.files import PAGE_BYTES, Version, open_regular, opened, read_at

STORED_PIECE_BYTES = 4 << 20
"""Bytes of a tensor that are read at once, if they are not packed. Digests of checkpoints depend on it."""
NEARBY_BYTES = 1 << 20
"""Linux maps pages around the one that is read, also pages that were dropped before. They are dropped with each piece.
Otherwise 90 MB of a file of 1.1 GB stay in memory instead of 4 MB (Linux 6.18)."""


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
        """Drops the pages of a range from this process's memory, and those nearby; a later access reads them again."""
        first = max(begin - begin % PAGE_BYTES - NEARBY_BYTES, 0)
        end = min(begin + num_bytes + NEARBY_BYTES, len(self.data))
        self.data.madvise(mmap.MADV_DONTNEED, first, end - first)


class MappedFile(ABC):
    """A file of tensors mapped into memory. Threads may share one object.

    Views of it stay valid after `close()`: the mapping lives as long as any of them."""

    def __init__(self, path: Path):
        """Maps the file. Raises what `open_regular` raises."""
        self.path = path
        with opened(path) as descriptor:
            self.version = Version.of(descriptor)
            self._mapping = Mapping(descriptor, self.version.size) if self.version.size else None
        self._data = self._mapping.data if self._mapping else b""
        self._descriptor: int | None = None
        """The open file, if rows are read after `close`."""

    @abstractmethod
    def range_of(self, name: str, start: int, stop: int | None) -> tuple[int, int]:
        """First byte in the file, and number of bytes, of rows [start, stop) of a tensor. Rows are counted through all
        dimensions but the last."""

    def view(self, dtype: torch.dtype, nbytes: int, begin: int) -> Tensor:
        """A view of `nbytes` bytes from byte `begin` of the file, as a vector. Raises ValueError if the file is
        closed."""
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        if self._mapping is None:
            return torch.frombuffer(self._read_closed(begin, nbytes), dtype=dtype)
        return self._mapping.tensor(dtype, nbytes // dtype.itemsize, begin)

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Drops the mapped pages of rows [start, stop) from this process's memory; a later access reads them again."""
        if self._mapping is None:
            return
        begin, nbytes = self.range_of(name, start, stop)
        if nbytes:
            self._mapping.release(begin, nbytes)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yields the stored bytes of a tensor in pieces, and drops the pages of each from this process's memory."""
        begin, nbytes = self.range_of(name, 0, None)
        for start in range(begin, begin + nbytes, STORED_PIECE_BYTES):
            count = min(STORED_PIECE_BYTES, begin + nbytes - start)
            yield memoryview(self.view(torch.uint8, count, start).numpy())
            self._mapping.release(start, count)

    def keep(self, name: str) -> None:
        """Lets rows of a tensor be read after `close`, one by one and without the mapping. Raises ValueError if the
        file has changed."""
        if self._descriptor is not None:
            return
        self._descriptor = open_regular(self.path)
        weakref.finalize(self, os.close, self._descriptor)
        if Version.of(self._descriptor) != self.version:
            raise ValueError(f"{self.path} was changed while it was read; load the model again")
        os.posix_fadvise(self._descriptor, *self.range_of(name, 0, None), os.POSIX_FADV_RANDOM)  # no reading ahead

    def _read_closed(self, begin: int, nbytes: int) -> bytearray:
        """Reads bytes of a kept file. Raises ValueError for another one, and if the file has become shorter."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} has been closed; no tensor can be read from it")
        found = bytearray(read_at(self._descriptor, self.path, nbytes, begin))
        if len(found) < nbytes:
            raise ValueError(f"{self.path} has become shorter since the model was loaded; load it again")
        return found

    def close(self) -> None:
        self._mapping, self._data = None, b""


def address_of(data: mmap.mmap) -> int:
    """Address at which a mapping begins."""
    return np.frombuffer(data, np.uint8).ctypes.data
