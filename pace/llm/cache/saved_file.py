"""The file of a saved sequence: what describes it, then its contents in pieces.

    [ magic ][ length of the head ][ head: JSON ][ pieces ][ a digest for each piece ][ seal ]

The seal is a BLAKE2b digest of all that is not a piece. So each byte is covered. The head has the size of each piece,
and the file ends after the seal. So a truncated file, or a damaged head, is found before any piece is read. The number
in the magic is the version of the other digests. Version 1 is still read.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from pace.checkpoints.digest import DIGESTS, VERSION, blake2b, xxh64
from pace.checkpoints.files import open_regular, parse_json, read_at
from pace.memory import reserve

MAGICS = {version: b"pace session %d\n\0" % version for version in DIGESTS}
MAGIC = MAGICS[VERSION]
MAGIC_OF_ANY = b"pace session "
SEAL_BYTES = 16
MAX_HEAD_BYTES = 16 << 20
"""A head has about 10 bytes for each piece, and a piece has megabytes."""
READ_AHEAD = 4
"""Pieces that are read and checked at once: a disk is faster with several requests."""
ABANDONED_SECONDS = 3600.0
LENGTH = struct.Struct("<Q")
AGAIN = "compute it again"


class SavedFile:
    """An open file whose head and seal are right. As a context manager it closes the file."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError if there is no file. Raises ValueError, which names the file and the reason, if it
        is none of a saved sequence, damaged or truncated."""
        self.path = path
        try:
            self._descriptor = open_regular(path)
        except PermissionError as error:
            raise ValueError(str(error)) from None
        try:
            self.head, self._digests = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> tuple[dict[str, Any], list[bytes]]:
        size = os.fstat(self._descriptor).st_size
        start = self._bytes(len(MAGIC) + LENGTH.size, 0)
        self.version = next((each for each, magic in MAGICS.items() if start.startswith(magic)), 0)
        if not self.version:
            if start.startswith(MAGIC_OF_ANY) and len(start) >= len(MAGIC) and start[len(MAGIC) - 2 :][:2] == b"\n\0":
                raise self.refused(f"it has a format of another version of pace; {AGAIN}")
            raise self.refused("it is empty" if not start else "it is not a saved session of pace, or is damaged")
        if len(start) < len(MAGIC) + LENGTH.size:
            raise self.truncated(size, "more than that")
        (length,) = LENGTH.unpack(start[len(MAGIC) :])
        if length > MAX_HEAD_BYTES:
            raise self.refused(f"it announces a head of {length:,} bytes, so it is damaged; {AGAIN}")
        if len(start) + length > size:
            raise self.truncated(size, "more than that")
        head_bytes = self._bytes(length, len(start))
        try:
            head = parse_json(head_bytes, "its head")
            sizes = head["sizes"]
            if not all(type(one) is int and one >= 0 for one in sizes):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            raise self.refused(f"its head is damaged; {AGAIN}") from None
        self._starts = [len(start) + length]
        for one in sizes:
            self._starts.append(self._starts[-1] + one)
        digest_bytes = len(DIGESTS[self.version](b""))
        trailer_bytes = digest_bytes * len(sizes) + SEAL_BYTES
        end = self._starts[-1] + trailer_bytes
        if size < end:
            raise self.truncated(size, f"{end:,}")
        if size > end:
            raise self.refused(f"it has {size - end:,} bytes after its end; {AGAIN}")
        trailer = self._bytes(trailer_bytes, self._starts[-1])
        digests, seal = trailer[:-SEAL_BYTES], trailer[-SEAL_BYTES:]
        if blake2b(start, head_bytes, digests) != seal:
            raise self.refused(f"its head or its checksums are damaged; {AGAIN}")
        return head, [digests[at : at + digest_bytes] for at in range(0, len(digests), digest_bytes)]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece."""
        return [stop - start for start, stop in zip(self._starts, self._starts[1:])]

    def piece(self, number: int, memory: memoryview | None = None) -> memoryview:
        """Reads a piece, into the beginning of `memory` if it is given. Raises ValueError if it is damaged."""
        start, size = self._starts[number], self.sizes[number]
        data = memoryview(bytearray(size)) if memory is None else memory[:size]
        if self._read_into(data, start) < size or DIGESTS[self.version](data) != self._digests[number]:
            raise self.refused(f"its contents are damaged (bytes from {start:,} on); {AGAIN}")
        return data

    def pieces(self, first: int, prepare: Callable[[int], None] = lambda number: None) -> Iterator[memoryview]:
        """Yields all pieces from number `first` on, each valid until the next. Reads and checks some ahead, on other
        threads, which call `prepare` with the number of each before. All share the same memory, because new pages take
        longer to get than to fill."""

        def read(number: int, place: memoryview) -> memoryview:
            prepare(number)
            return self.piece(number, place)

        room = max([1, *self.sizes[first:]])
        memory = memoryview(reserve(READ_AHEAD * room, huge_pages=True))
        places = cycle(memory[start : start + room] for start in range(0, len(memory), room))
        ahead: deque[Future[memoryview]] = deque()
        with ThreadPoolExecutor(READ_AHEAD) as pool:
            for number, place in zip(range(first, len(self.sizes)), places):
                ahead.append(pool.submit(read, number, place))
                if len(ahead) == READ_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def refused(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} cannot be loaded: {reason}")

    def truncated(self, size: int, expected: str) -> ValueError:
        return self.refused(f"it is truncated: it has {size:,} bytes and should have {expected}; {AGAIN}")

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> SavedFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _bytes(self, count: int, offset: int) -> bytes:
        return read_at(self._descriptor, self.path, count, offset)

    def _read_into(self, data: memoryview, offset: int) -> int:
        """Fills `data`; returns the number of bytes, fewer if the file ends."""
        rest = data
        try:
            while rest and (count := os.preadv(self._descriptor, [rest], offset)):
                rest, offset = rest[count:], offset + count
        except OSError as error:
            raise self.refused(f"it cannot be read ({error.strerror})") from None
        return len(data) - len(rest)


def write_file(path: Path, head: dict[str, Any], sizes: list[int], pieces: Iterable[bytes | memoryview]) -> int:
    """Writes a file, and puts it in the place of an earlier one when it is complete and on disk. Returns its size in
    bytes. `pieces` have the `sizes`. If they raise, or the disk is full, the earlier file stays. Raises OSError."""
    head_bytes = json.dumps(head | {"sizes": sizes}, separators=(",", ":")).encode()
    start = MAGIC + LENGTH.pack(len(head_bytes))
    digests: list[bytes] = []
    with _replacing(path) as file:
        file.write(start + head_bytes)
        for size, piece in zip(sizes, pieces, strict=True):
            assert memoryview(piece).nbytes == size
            file.write(piece)
            digests.append(xxh64(piece))
        trailer = b"".join(digests)
        file.write(trailer + blake2b(start, head_bytes, trailer))
        return file.tell()


def remove_abandoned(folder: Path, names: str) -> None:
    """Removes what processes that were killed had begun to write in place of the files `names`, a pattern. Other
    processes may be writing younger ones."""
    for partial in folder.glob(f".{names}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > ABANDONED_SECONDS:
                partial.unlink()


@contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """Yields a file that replaces `path` at the end of the block. After an error there is only the earlier file."""
    remove_abandoned(path.parent, glob.escape(path.name[:200]))
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.part")
    try:
        with open(partial, "xb", buffering=0, opener=_private) as file:
            yield _WholeWrites(file)
            os.fsync(file.fileno())
        os.replace(partial, path)
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    """Opens a file that only this user may read: it has the words of a conversation."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


class _WholeWrites:
    """Writes all bytes, which a raw file may do in several calls."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        rest = rest.cast("B") if rest.nbytes else rest[:0]  # Python does not cast views without elements
        while rest:
            rest = rest[self._file.write(rest) :]

    def tell(self) -> int:
        return self._file.tell()
