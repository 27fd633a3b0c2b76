"""Opens and parses the files of a checkpoint, with one clear error for each way a file can be wrong.

A checkpoint is untrusted data. This module follows no name out of the checkpoint's directory. It opens only regular
files: a FIFO would block for ever, and `/dev/zero` never ends. It parses no JSON of unlimited size."""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# JSON of n bytes becomes at most about 20 n bytes of Python objects ("[],[],[]"). This limit therefore keeps a hostile
# file under 100 MB. The largest config.json of the supported families is 5 KB.
MAX_CONFIG_BYTES = 4 << 20

# Unit in which pages are dropped and read ahead.
PAGE_BYTES = mmap.PAGESIZE

INFINITE_FIELDS = frozenset({"time_step_limit", "mamba_dt_limit"})
"""Fields of Mamba-2 models that may hold `Infinity` in JSON, as transformers writes it."""


def open_regular(path: Path) -> int:
    """Opens a regular file and returns a read-only descriptor, which the caller closes.

    Raises FileNotFoundError (missing, broken link), PermissionError, or ValueError (directory, device, FIFO, unusable
    name)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist{_broken_link(path)}") from None
    except PermissionError:
        raise PermissionError(f"{path} may not be read by this user; check its permissions") from None
    except (OSError, ValueError) as error:  # name too long, a loop of links, or a NUL in the name
        raise ValueError(f"{str(path)!r} cannot be opened: {error}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a directory" if stat.S_ISDIR(mode) else "a device, pipe or socket"
        raise ValueError(f"{path} is {kind}; a regular file is needed there")
    return descriptor


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yields the descriptor of `open_regular` and closes it."""
    descriptor = open_regular(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Version(NamedTuple):
    """The size and times of an open file. A file that is written or replaced later has another version."""

    size: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: int | Path) -> Version:
        """The version of a descriptor's file, or of the file that is at a path now."""
        status = os.stat(file)
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def read_at(descriptor: int, path: Path, count: int, offset: int = 0) -> bytes:
    """Reads `count` bytes from `offset`, or fewer at the end of the file. Raises ValueError if the system cannot read
    them."""
    parts = []
    try:
        while count and (part := os.pread(descriptor, count, offset)):
            parts.append(part)
            count, offset = count - len(part), offset + len(part)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return b"".join(parts)


def _broken_link(path: Path) -> str:
    if not os.path.islink(path):
        return ""
    return f" (it is a link to {os.readlink(path)}, which does not exist; an interrupted download leaves such links)"


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Reads all bytes of a file. Raises what `open_regular` raises, and ValueError for a file larger than `max_bytes`
    or a Git LFS pointer."""
    with opened(path) as descriptor:
        data = read_at(descriptor, path, max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes:,} bytes, which no valid file of this kind is")
    refuse_git_lfs(path, data)
    return data


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict:
    """Reads the JSON object in a UTF-8 file.

    Raises what `read_whole` raises, and ValueError that names the file. ValueError means: not UTF-8, not JSON, or not
    an object. It also means a key given twice with different values, NaN, or a number that `parse_json` refuses."""
    data = read_whole(path, max_bytes)
    if not data.strip():
        raise ValueError(f"{path} is empty; copy or download it again")
    value = parse_json(data, str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object {{...}}, but holds {_kind(value)}")
    return value


def asks_for_nothing(value: object) -> bool:
    """True for null, false and an empty text, list or object: a field of a config that has no effect."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def parse_json(data: bytes, where: str):
    """Parses any JSON value, more strictly than `json.loads`. Raises ValueError that names `where`, also for repeated
    keys with different values, for NaN, and for infinite numbers outside of `INFINITE_FIELDS`."""

    may_be_infinite = b"Infinity" in data

    def constant(text: str) -> float:
        if text != "Infinity":
            raise ValueError(f"{text} is not a JSON number")
        return math.inf

    def finite_float(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"the number {text[:40]} is too large")
        return number

    def checked(pairs: list[tuple[str, object]]) -> dict:
        result = dict(pairs)
        for key, value in pairs if may_be_infinite else ():
            if key not in INFINITE_FIELDS:
                refuse_infinity(value)
        if len(result) != len(pairs):
            for key, value in pairs:
                if result[key] != value:
                    raise ValueError(f"the key {key[:200]!r} is given twice with different values")
        return result

    def refuse_infinity(value: object) -> None:
        values = [value]
        for value in values:
            if isinstance(value, list):
                values += value
            elif value == math.inf:
                raise ValueError("Infinity is not a JSON number")

    try:
        value = json.loads(
            data.decode("utf-8"),
            parse_constant=constant,
            parse_float=finite_float,
            object_pairs_hook=checked,
        )
        if may_be_infinite:
            refuse_infinity(value)
        return value
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be a valid file of this kind") from None
    except ValueError as error:  # includes JSONDecodeError, UnicodeDecodeError and integers with too many digits
        raise ValueError(f"{where} is not valid JSON: {error}") from None


def _kind(value) -> str:
    return {list: "a list", str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")


def refuse_git_lfs(path: Path, data: bytes) -> None:
    """Raises ValueError if a file that begins with `data` is a Git LFS pointer."""
    if data.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in that clone, or download the file"
        )


def file_inside(directory: Path, name: object, named_by: str) -> Path:
    """Returns the path of a file that a checkpoint names. The name must be relative and stay inside `directory`, else
    ValueError.

    Links are followed when the file is opened, since the Hub's cache keeps its files behind links."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{named_by} must be a file name, but is {str(name)[:200]!r}")
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name or not relative.parts:
        raise ValueError(f"{named_by} is {name[:200]!r}, which is not a file name inside {directory}")
    return directory / relative
