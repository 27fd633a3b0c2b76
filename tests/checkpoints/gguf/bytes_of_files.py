"""GGUF files built byte by byte, valid and invalid, without the gguf package."""

from __future__ import annotations

import struct
from typing import NamedTuple

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(value: str | bytes) -> bytes:
    """A string."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key and its value, of the type `kind`."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], number: int, offset: int) -> bytes:
    """The header's entry for a tensor, with `shape` in torch's order."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, offset)


def whole(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    version: int = 3,
    alignment: int = 32,
    **counts: int,
) -> bytes:
    """A file; `num_tensors` and `num_entries` may be wrong counts."""
    header = b"GGUF" + struct.pack(
        "<IQQ", version, counts.get("num_tensors", len(tensors)), counts.get("num_entries", len(entries))
    )
    header += b"".join(entries) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data


class Parts(NamedTuple):
    """A file taken apart; `whole(*parts)` puts it together."""

    entries: list[bytes]
    tensors: list[bytes]
    data: bytes


def taken_apart(content: bytes) -> Parts:
    """Takes apart a valid file with the usual alignment."""
    position = 24

    def skip_text() -> None:
        nonlocal position
        position += 8 + struct.unpack_from("<Q", content, position)[0]

    def skip_value(kind: int) -> None:
        nonlocal position
        if kind == STRING:
            skip_text()
        elif kind == ARRAY:
            inner, count = struct.unpack_from("<IQ", content, position)
            position += 12
            for _ in range(count):
                skip_value(inner)
        else:
            position += {U8: 1, I8: 1, BOOL: 1, U16: 2, I16: 2, U32: 4, I32: 4, F32: 4}.get(kind, 8)

    num_tensors, num_entries = struct.unpack_from("<QQ", content, 8)
    entries, tensors = [], []
    for _ in range(num_entries):
        begin = position
        skip_text()
        position += 4
        skip_value(struct.unpack_from("<I", content, position - 4)[0])
        entries.append(content[begin:position])
    for _ in range(num_tensors):
        begin = position
        skip_text()
        position += 16 + 8 * struct.unpack_from("<I", content, position)[0]
        tensors.append(content[begin:position])
    return Parts(entries, tensors, content[-(-position // 32) * 32 :])


def name_of(part: bytes) -> tuple[str, bytes]:
    """The name that an entry or a tensor begins with, and the rest."""
    length = struct.unpack_from("<Q", part)[0]
    return part[8 : 8 + length].decode(), part[8 + length :]
