"""Digests that find damage and differences: of bytes, and of a checkpoint's contents.

Version 2 hashes chunks with XXH64, as fast as memory is read. Version 1 is BLAKE2b, ten times slower; files of earlier
versions of pace have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from pace import _C
from pace.checkpoints.mapping import STORED_PIECE_BYTES, MappedFile
from pace.checkpoints.reader import OpenFiles
from pace.checkpoints.torch_file import TorchFile

Bytes = bytes | bytearray | memoryview

VERSION = 2


def xxh64(data: Bytes) -> bytes:
    """Returns the 8 bytes of XXH64 with seed 0, in the order in which it is printed."""
    return _C.xxh64(data).to_bytes(8, "big")


def blake2b(*parts: Bytes) -> bytes:
    """Returns the 16 bytes of BLAKE2b of all parts together."""
    return _blake2b(parts, 16)


DIGESTS: dict[int, Callable[[Bytes], bytes]] = {1: blake2b, VERSION: xxh64}
"""Version -> the digest of a piece of a file."""


def checkpoint_digest(files: OpenFiles, others: Mapping[str, bytes], workers: int, version: int = VERSION) -> str:
    """Returns the digest of a checkpoint's contents, in hexadecimal: its tensors, and `others`, such as the config, by
    name. It does not depend on names or times of files, or on how tensors are split into files. Reads all tensors, with
    `workers` threads."""

    def describe(tensor: tuple[MappedFile | TorchFile, str]) -> str:
        """Describes a tensor completely, in a line."""
        file, name = tensor
        dtype, shape = file.tensors[name][:2]
        parts = file.pieces(name)
        digest = _hexadecimal(parts if version == 1 else _hashes(parts))
        return f"tensor {name!r} {getattr(dtype, 'name', dtype)} {list(shape)} {digest}"

    tensors = [(file, name) for file in files.distinct for name in file.tensors]
    with ThreadPoolExecutor(workers) as pool:
        lines = [*pool.map(describe, tensors)]
    lines += [f"{name} {_hexadecimal([data])}" for name, data in others.items()]
    return _hexadecimal(line.encode() + b"\n" for line in sorted(lines))


def _hashes(parts: Iterable[memoryview]) -> Iterator[bytes]:
    """Yields the hashes of a tensor's chunks. All parts but the last are whole chunks."""
    for part in parts:
        for start in range(0, len(part), STORED_PIECE_BYTES):
            yield xxh64(part[start : start + STORED_PIECE_BYTES])


def _hexadecimal(parts: Iterable[Bytes]) -> str:
    return _blake2b(parts, 32).hex()


def _blake2b(parts: Iterable[Bytes], size: int) -> bytes:
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(part)
    return digest.digest()
