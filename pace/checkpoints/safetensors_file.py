"""Reads one `.safetensors` file through a memory mapping.

    [ 8 bytes: header length n, little endian ][ n bytes: JSON header ][ data ]

The header maps each tensor's name to its dtype, shape and `data_offsets` [begin, end) in the data. It is checked
completely when the file is opened. Afterwards every read is in bounds, and every byte of the data belongs to exactly
one tensor. Source: https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from pace.checkpoints.files import parse_json, refuse_git_lfs
from pace.checkpoints.mapping import MappedFile

# About 100 bytes describe a tensor, so this is room for 160,000 tensors in one file. The supported families have at
# most a few thousand. The limit bounds the memory that a hostile header can cost.
MAX_HEADER_BYTES = 16 << 20

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8),  # since torch 2.7; else exponents as bytes
}  # fmt: skip

# Quantised formats that torch, or an older version of it, cannot represent.
OTHER_DTYPES = ("F4", "F6_E2M3", "F6_E3M2")


class TensorInfo(NamedTuple):
    """Dtype and shape of a tensor, known before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def copy_in_own_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous, aligned copy that returns its memory to the system when freed. malloc would keep many pieces of
    megabytes from several threads."""
    if tensor.numel() == 0:
        return torch.empty_like(tensor)
    pages = mmap.mmap(-1, tensor.nbytes)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


class SafetensorsFile(MappedFile):
    """An open file: `tensors`, and views into its mapping."""

    def __init__(self, path: Path):
        """Maps the file and checks its header. Raises what `open_regular` raises, and ValueError."""
        super().__init__(path)
        header = _read_header(path, self._data, self.version.size)
        self._data_start = 8 + len(header)
        self._mapping.release(0, self._data_start)
        self.tensors, self._begin = _check_header(path, header, self.version.size - self._data_start)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Reads rows [start, stop) of a tensor (all by default) without a copy. Rows are counted through all dimensions
        but the last.

        The result is read-only. Data that is not aligned for its dtype is copied. Raises ValueError if the file is
        closed."""
        dtype, shape = self.tensors[name]
        begin, nbytes = self.range_of(name, start, stop)
        if begin % dtype.itemsize == 0:  # the mapping itself starts on a page
            flat = self.view(dtype, nbytes, begin)
        else:
            flat = copy_in_own_pages(self.view(torch.uint8, nbytes, begin)).view(dtype)
        if len(shape) > 1:
            return flat.reshape(len(range(prod(shape[:-1]))[start:stop]), shape[-1])
        return flat if shape else flat.reshape(())

    def range_of(self, name: str, start: int, stop: int | None) -> tuple[int, int]:
        info = self.tensors[name]
        begin = self._data_start + self._begin[name]
        if not info.shape:
            return begin, info.nbytes
        *lead, columns = info.shape if len(info.shape) > 1 else (*info.shape, 1)
        rows = range(prod(lead))[start:stop]
        row_bytes = columns * info.dtype.itemsize
        return begin + rows.start * row_bytes, len(rows) * row_bytes


def _read_header(path: Path, data: mmap.mmap | bytes, size: int) -> bytes:
    """Reads the header's bytes. Raises ValueError if the file is too short for them."""
    refuse_git_lfs(path, data[:64])
    if size < 8:
        raise ValueError(f"{path} has {size} bytes, too few for a safetensors file; download or copy it again")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path} announces a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are allowed. "
            "It is damaged or not a safetensors file"
        )
    if 8 + length > size:
        raise ValueError(
            f"{path} announces a header of {length:,} bytes but has {size:,} in all: it is truncated; "
            "download or copy it again"
        )
    return data[8 : 8 + length]


def _check_header(path: Path, header: bytes, data_bytes: int) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Returns the tensors of a header, and where each begins in the data. Raises ValueError for the first error
    found."""
    where = f"the header of {path}"
    entries = parse_json(header, where)
    if not isinstance(entries, dict):
        raise ValueError(f"{where} must be a JSON object")
    entries.pop("__metadata__", None)
    tensors, ranges = {}, []
    for name, entry in entries.items():
        tensors[name], begin, end = _check_entry(f"tensor {name[:200]!r} in {path}", entry)
        ranges.append((begin, end, name))
    ranges.sort()
    covered = 0
    for begin, end, name in ranges:
        if begin != covered:
            problem = "overlaps another tensor" if begin < covered else f"leaves bytes {covered}..{begin} unused"
            raise ValueError(f"tensor {name[:200]!r} in {path} {problem}: the header is damaged")
        covered = end
    if covered != data_bytes:
        problem = "is truncated" if covered > data_bytes else "has bytes that belong to no tensor"
        raise ValueError(
            f"{path} {problem}: its tensors need {covered:,} bytes of data and it has {data_bytes:,}; "
            "download or copy it again"
        )
    return tensors, {name: begin for begin, _, name in ranges}


def _check_entry(where: str, entry: object) -> tuple[TensorInfo, int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{where} must have dtype, shape and data_offsets, but its header entry is {str(entry)[:200]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype in OTHER_DTYPES:
        raise NotImplementedError(
            f"{where} is stored as {dtype}, which is not supported; use a checkpoint in BF16, F16 or F32"
        )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where} has the unknown dtype {str(dtype)[:80]!r}; known are {', '.join(DTYPES)}")
    if not _is_list_of_sizes(shape):
        raise ValueError(f"{where} has the shape {str(shape)[:200]}; a list of non-negative integers is needed")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{where} has the data_offsets {str(offsets)[:200]}; two non-negative integers are needed")
    begin, end = offsets
    info = TensorInfo(DTYPES[dtype], tuple(shape))
    if end - begin != info.nbytes:
        raise ValueError(
            f"{where} has {end - begin} bytes of data, but {dtype} of shape {str(shape)[:200]} needs {info.nbytes}"
        )
    return info, begin, end


def _is_list_of_sizes(value: object) -> bool:
    # 2**62 is the largest size torch accepts. bool is an int in Python, not in JSON.
    return isinstance(value, list) and len(value) <= 64 and all(type(v) is int and 0 <= v < 1 << 62 for v in value)
