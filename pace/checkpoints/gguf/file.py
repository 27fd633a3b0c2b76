"""Reads one GGUF file through a memory mapping. Its parts, in order:

    "GGUF", version, number of tensors, number of entries
    entries: key, type, value

    tensors: name, dimensions, type, offset
    padding to a multiple of general.alignment

    data of the tensors

Everything is little endian. A string is its length and its bytes. An array is its element type, number of elements and
elements. The header is checked completely when the file is opened; afterwards every read is in bounds.

The gguf package's `GGUFReader` is the reference in the tests. It is not used for reading, because it makes several
numpy views for every token of a vocabulary. It also trusts all numbers in a file (benchmarks/RESULTS.md, "Headers of
GGUF files").

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace import _C
from pace.checkpoints.files import refuse_git_lfs
from pace.checkpoints.gguf.blocks import BLOCK_TYPES, OTHER_TYPES, Q2_0, WIDE_Q2_0, BlockType
from pace.checkpoints.mapping import MappedFile
from pace.naming import dtype_name, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20
"""A vocabulary of 262,000 tokens with scores, types and 515,000 merges takes 20 MB."""
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 62
"""Largest size that torch accepts."""

FLOAT_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64}
"""ggml's type number -> dtype."""
INTEGER_TYPES = {27: torch.int64}
"""The same for numbers that are no weights: token ids of a drafter."""
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""Types of values: number -> numpy's name."""
STRING, ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """Header entry of a tensor."""

    kind: torch.dtype | BlockType
    shape: tuple[int, ...]
    """Shape in torch's order, rows first."""
    begin: int
    """First byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; a vector is one row."""
        k = prod(self.shape[-1:])
        return self.kind.row_bytes(k) if isinstance(self.kind, BlockType) else k * self.kind.itemsize

    @property
    def num_rows(self) -> int:
        """Number of rows, counted through all dimensions but the last."""
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes


class Metadata(dict[str, Any]):
    """Keys and values of a file: numbers, booleans, strings, lists of strings, numpy arrays of numbers. Each method
    reads one key. It raises ValueError that names the file and the key if the value has another type.

    With a `prefix`, only keys that begin with it are included, and the prefix is removed from them."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = ""):
        super().__init__({key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)})
        self.path, self.prefix = path, prefix

    def integer(self, key: str, default: int | None = None) -> int | None:
        return self._read(key, default, lambda value: type(value) is int, "an integer")

    def number(self, key: str, default: float | None = None) -> float | None:
        return self._read(key, default, lambda value: type(value) in (int, float), "a number")

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        return self._read(key, default, lambda value: type(value) is bool, "true or false")

    def text(self, key: str, default: str | None = None) -> str | None:
        return self._read(key, default, lambda value: isinstance(value, str), "a string")

    def texts(self, key: str) -> list[str] | None:
        return self._read(key, None, lambda value: isinstance(value, list), "an array of strings")

    def numbers(self, key: str) -> np.ndarray | None:
        return self._read(key, None, lambda value: isinstance(value, np.ndarray), "an array of numbers")

    def forget_lists(self) -> None:
        """Drops all lists and arrays, and the cached tokens."""
        for key in [key for key, value in self.items() if isinstance(value, (list, np.ndarray))]:
            del self[key]
        self.__dict__.pop("tokens", None)

    def required(self, key: str, value: Any) -> Any:
        """Returns `value`, read from `key`. Raises ValueError if it is None."""
        if value is None:
            raise ValueError(f"{self.path} has no {self.prefix}{key} in its metadata")
        return value

    def _read(self, key: str, default: Any, fits, what: str) -> Any:
        value = self.get(key)
        if value is None:
            return default
        if not fits(value):
            raise ValueError(f"{self.path}: {self.prefix}{key} must be {what}; got {shown(value)}")
        return value


class GgufFile(MappedFile):
    """An open file: `metadata`, `tensors`, and the bytes of rows in its mapping."""

    def __init__(self, path: Path):
        """Maps the file and checks its header. Raises what `open_regular` raises, ValueError (damaged), or
        NotImplementedError (version, endianness or tensor type). The message names the file."""
        super().__init__(path)
        header = _Header(path, self._data, self.version.size)
        self.metadata, self.tensors = header.read()
        self._mapping.release(0, header.position)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Stored rows [start, stop) of a tensor, uint8 `[rows, row_bytes]`: a read-only view. Raises ValueError if the
        file is closed."""
        begin, nbytes = self.range_of(name, start, stop)
        tensor = self.tensors[name]
        return self.view(torch.uint8, nbytes, begin).view(len(range(tensor.num_rows)[start:stop]), tensor.row_bytes)

    def range_of(self, name: str, start: int, stop: int | None) -> tuple[int, int]:
        tensor = self.tensors[name]
        rows = range(tensor.num_rows)[start:stop]
        return tensor.begin + rows.start * tensor.row_bytes, len(rows) * tensor.row_bytes


def is_gguf(path: Path) -> bool:
    """True if the path is a file with GGUF's first bytes or suffix."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def is_wide_q2_0(tensors: dict[str, GgufTensor], size: int, alignment: int) -> bool:
    """True if every Q2_0 tensor takes the space of `WIDE_Q2_0`, up to the next tensor or the end of a file of `size`
    bytes. The other Q2_0 takes more."""
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.begin)
    ends = [tensor.begin for tensor in in_order[1:]] + [size]
    places = [(tensor, end) for tensor, end in zip(in_order, ends) if tensor.kind is Q2_0]
    return bool(places) and all(
        tensor.shape[-1] % WIDE_Q2_0.weights == 0
        and 0 <= end - tensor.begin - tensor._replace(kind=WIDE_Q2_0).nbytes < alignment
        for tensor, end in places
    )


class _Header:
    """Parser of a header, from front to back."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, size: int):
        self.path, self.data, self.size = path, data, size
        self.end = min(size, MAX_HEADER_BYTES)
        self.position = 0

    def read(self) -> tuple[Metadata, dict[str, GgufTensor]]:
        num_tensors, num_entries = self._beginning()
        entries: dict[str, Any] = {}
        # An entry takes at least 13 bytes, a tensor 24. A count that the file cannot hold is therefore found before the
        # loop.
        for _ in range(self._count(num_entries, 13, "metadata entries")):
            key = self._string("a key")
            if key in entries:
                raise ValueError(f"{self.path} has the key {key[:200]!r} twice: its header is damaged")
            entries[key] = self._value(f"the value of {key[:200]!r}", self._number("<I"))
        metadata = Metadata(self.path, entries)
        alignment = metadata.integer("general.alignment", 32)
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{self.path}: general.alignment must be a power of two; got {alignment}")
        found: dict[str, tuple[torch.dtype | BlockType, tuple[int, ...], int]] = {}
        for _ in range(self._count(num_tensors, 24, "tensors")):
            name = self._string("a tensor's name")
            if name in found:
                raise ValueError(f"{self.path} has the tensor {name[:200]!r} twice: its header is damaged")
            found[name] = self._tensor(name)
        data_start = -(-self.position // alignment) * alignment
        tensors = {name: GgufTensor(kind, shape, data_start + offset) for name, (kind, shape, offset) in found.items()}
        if is_wide_q2_0(tensors, self.size, alignment):
            tensors = {
                name: tensor._replace(kind=WIDE_Q2_0) if tensor.kind is Q2_0 else tensor
                for name, tensor in tensors.items()
            }
        self._check_places(tensors)
        return metadata, tensors

    def _beginning(self) -> tuple[int, int]:
        """Checks the magic and the version. Returns the number of tensors and of entries."""
        refuse_git_lfs(self.path, self.data[:64])
        if self.size < 24 or self._take(4) != MAGIC:
            raise ValueError(
                f"{self.path} is not a GGUF file: it has {self.size} bytes and begins with {shown(self.data[:4])}; "
                "download or copy it again"
            )
        version = self._number("<I")
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                raise NotImplementedError(
                    f"{self.path} is a big-endian GGUF file, which is not implemented; convert it with "
                    f"`gguf-convert-endian {self.path} little`"
                )
            raise NotImplementedError(
                f"{self.path} has version {version} of GGUF; implemented: {', '.join(map(str, VERSIONS))}"
            )
        return self._number("<Q"), self._number("<Q")

    def _take(self, count: int) -> bytes:
        begin, self.position = self.position, self.position + count
        if self.position > self.end:
            raise self._too_long()
        return self.data[begin : self.position]

    def _too_long(self) -> ValueError:
        """The error for a header that is longer than the file or than MAX_HEADER_BYTES."""
        if self.end == self.size:
            return ValueError(
                f"{self.path} is truncated or damaged: its header continues beyond its {self.size:,} bytes; "
                "download or copy it again"
            )
        return ValueError(f"{self.path} has a header of more than {MAX_HEADER_BYTES:,} bytes, which no valid file has")

    def _number(self, kind: str) -> int:
        [value] = struct.unpack(kind, self._take(struct.calcsize(kind)))
        return value

    def _count(self, count: int, min_bytes: int, what: str) -> int:
        if count * min_bytes > self.end - self.position:
            raise ValueError(
                f"{self.path} is truncated or damaged: it announces {count:,} {what}, which the rest of its header "
                "cannot hold"
            )
        return count

    def _string(self, what: str) -> str:
        return self._strings(what, 1)[0]

    def _strings(self, what: str, count: int) -> list[str]:
        """Reads strings in C++, because vocabularies have hundreds of thousands."""
        try:
            strings, self.position = _C.read_strings(self.data, self.position, self.end, count)
        except EOFError:
            raise self._too_long() from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} is not UTF-8 ({error}): its header is damaged") from None
        return strings

    def _value(self, what: str, kind: int) -> Any:
        if kind == STRING:
            return self._string(what)
        if kind == ARRAY:
            kind, count = self._number("<I"), self._number("<Q")
            if kind == STRING:
                return self._strings(what, self._count(count, 8, f"strings as {what}"))
            if kind == ARRAY:
                raise NotImplementedError(f"{self.path}: {what} is an array of arrays, which is not implemented")
            return self._numbers(what, kind, count)
        return self._numbers(what, kind, 1)[0].item()

    def _numbers(self, what: str, kind: int, count: int) -> np.ndarray:
        if kind not in NUMBERS:
            raise ValueError(f"{self.path}: {what} is of the unknown type {kind}: its header is damaged")
        dtype = np.dtype(NUMBERS[kind])
        data = self._take(self._count(count, dtype.itemsize, f"numbers as {what}") * dtype.itemsize)
        return np.frombuffer(data, np.uint8) != 0 if dtype.kind == "b" else np.frombuffer(data, dtype)

    def _tensor(self, name: str) -> tuple[torch.dtype | BlockType, tuple[int, ...], int]:
        """Type, shape and offset in the data."""
        where = f"tensor {name[:200]!r} in {self.path}"
        num_dimensions = self._number("<I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{where} has {num_dimensions} dimensions; at most {MAX_DIMENSIONS} are allowed")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._number("<I"), self._number("<Q")
        if prod(max(1, size) for size in shape) > MAX_ELEMENTS:
            raise ValueError(f"{where} has the shape {list(shape)}, which no file can hold")
        kind = FLOAT_TYPES.get(number) or INTEGER_TYPES.get(number) or BLOCK_TYPES.get(number)
        if kind is None:
            known = [dtype_name(dtype) for dtype in FLOAT_TYPES.values()] + [
                block.name for block in BLOCK_TYPES.values()
            ]
            raise NotImplementedError(
                f"{where} is stored as {OTHER_TYPES.get(number, f'type {number}')}, which is not implemented; "
                f"implemented: {', '.join(known)}"
            )
        if isinstance(kind, BlockType) and (not shape or shape[-1] % kind.weights):
            raise ValueError(
                f"{where} has the shape {list(shape)}; a row of {kind.name} has a multiple of {kind.weights} weights"
            )
        return kind, shape, offset

    def _check_places(self, tensors: dict[str, GgufTensor]) -> None:
        """Raises ValueError if a tensor ends beyond the file, or if two share bytes."""
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
            if tensor.begin + tensor.nbytes > self.size:
                raise ValueError(
                    f"{self.path} is truncated or damaged: tensor {name[:200]!r} ends at byte "
                    f"{tensor.begin + tensor.nbytes:,} of a file of {self.size:,}; download or copy it again"
                )
            if tensor.begin < end and tensor.nbytes:
                raise ValueError(
                    f"the tensors {before[:200]!r} and {name[:200]!r} in {self.path} share bytes: its header is damaged"
                )
            if tensor.nbytes:
                end, before = tensor.begin + tensor.nbytes, name
