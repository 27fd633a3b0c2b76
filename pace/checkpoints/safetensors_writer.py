"""Writes one `.safetensors` file piece by piece: its tensors are declared first, their data may come in any order."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from pace.checkpoints.safetensors_file import DTYPES, TensorInfo
from pace.memory import format_bytes

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter:
    """A new file with the tensors declared in `tensors`; `write` fills each of them.

        with SafetensorsWriter(path, {"a.weight": TensorInfo(torch.int8, (64, 32))}) as writer:
            writer.write("a.weight", rows, start)

    Data are aligned for their dtypes, so that readers can map them. It holds no memory apart from the pieces given.

    Raises FileExistsError if the path exists, and OSError if the disk has no room for the whole file. A `with` block
    that ends without an exception raises ValueError if bytes of a tensor were never written."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None):
        self.tensors = dict(tensors)
        self._begin: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        # Widest elements first, so that each tensor begins at a multiple of its element size.
        for name, info in sorted(self.tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            self._begin[name] = end
            header[name] = {
                "dtype": NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [end, end + info.nbytes],
            }
            end += info.nbytes
        encoded = json.dumps(header).encode()
        encoded += b" " * (-(8 + len(encoded)) % 64)
        self._missing = {name: info.nbytes for name, info in self.tensors.items()}
        self._data_start = 8 + len(encoded)
        needed, free = self._data_start + end, shutil.disk_usage(path.parent).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"the file needs {format_bytes(needed)}, and its disk has {format_bytes(free)} left; free some space, "
                "or write to another disk",
                str(path),
            )
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        _write_all(self._descriptor, memoryview(len(encoded).to_bytes(8, "little") + encoded), 0)

    def write(self, name: str, rows: Tensor, start: int = 0) -> None:
        """Writes rows `start ..` of a tensor, in its dtype; each row once. A number is one row. Raises ValueError for a
        wrong dtype, shape or range."""
        info = self.tensors[name]
        if (
            rows.dtype != info.dtype
            or tuple(rows.shape[1:]) != info.shape[1:]
            or rows.ndim != len(info.shape)
            or start < 0
            or start + prod(rows.shape[:1]) > prod(info.shape[:1])
        ):
            raise ValueError(
                f"cannot write {rows.dtype} of shape {tuple(rows.shape)} at row {start} of {name}, "
                f"which is {info.dtype} of shape {info.shape}"
            )
        begin = self._data_start + self._begin[name] + start * prod(info.shape[1:]) * info.dtype.itemsize
        _write_all(self._descriptor, memoryview(rows.contiguous().flatten().view(torch.uint8).numpy()), begin)
        self._missing[name] -= rows.nbytes

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        os.close(self._descriptor)
        unfinished = [name for name, num_bytes in self._missing.items() if num_bytes]
        if kind is None and unfinished:
            raise ValueError(f"each row must be written once, unlike those of {', '.join(unfinished[:10])}")


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
