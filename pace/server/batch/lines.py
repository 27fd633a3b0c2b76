"""The input of a batch: one request per line, `{"custom_id", "method", "url", "body"}`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pace.server.body import read_json
from pace.server.errors import ApiError

JSON_DEPTH = 128
MAX_NAMED = 5
"""Number of duplicates named in an error."""


@dataclass(frozen=True)
class LineError:
    """Reason why a line cannot be run."""

    code: str
    message: str


@dataclass(frozen=True)
class Line:
    """One request, or the reason why the line is invalid."""

    number: int
    """Line number, from 1."""
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    error: LineError | None = None


def read_line(data: bytes, number: int) -> Line:
    """Reads one line of untrusted input."""
    try:
        value = read_json(data, JSON_DEPTH)
    except ApiError as error:
        message = error.message.replace("the body", "the line", 1)
        return Line(number, error=LineError("invalid_json_line", message))
    if not isinstance(value, dict):
        return Line(number, error=LineError("invalid_json_line", "the line is not a JSON object"))
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Line(number, error=LineError("missing_required_parameter", "custom_id must be a string, and not empty"))
    why = _what_is_wrong(value)
    if why is not None:
        return Line(number, custom_id, error=why)
    return Line(number, custom_id, value["url"], value["body"])


def _what_is_wrong(value: dict[str, Any]) -> LineError | None:
    if value.get("method") != "POST":
        return LineError("invalid_method", 'method must be "POST"')
    if not isinstance(value.get("url"), str):
        return LineError("invalid_url", "url must be a string, such as /v1/chat/completions")
    if not isinstance(value.get("body"), dict):
        return LineError("invalid_request", "body must be a JSON object")
    return None


class BatchInput:
    """A file of requests, read twice: to check it, and to run it. Must be used in a `with` block; the file may be
    larger than memory."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """`file` must be seekable."""
        self._file = file
        self.name = name

    @classmethod
    def open(cls, path: Path) -> BatchInput:
        """Opens a file. Raises OSError."""
        return cls(path.open("rb"), str(path))

    @classmethod
    def spool(cls, stream: BinaryIO) -> BatchInput:
        """Copies a stream that can be read only once, such as stdin, to a temporary file."""
        file = tempfile.TemporaryFile()
        shutil.copyfileobj(stream, file)
        return cls(file, "stdin")

    def __enter__(self) -> BatchInput:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Line]:
        """Yields the lines from the first; skips blank ones."""
        self._file.seek(0)
        for number, data in enumerate(self._file, 1):
            if number == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            if data.strip():
                yield read_line(data, number)

    def check(self) -> int:
        """Returns the number of lines. Raises ValueError for a duplicate `custom_id`: its results would be
        ambiguous."""
        count, first_lines, twice = 0, {}, []
        for line in self:
            count += 1
            if line.custom_id is None:
                continue
            first = first_lines.setdefault(line.custom_id, line.number)
            if first != line.number:
                twice.append(f"{line.custom_id[:40]!r} in lines {first} and {line.number}")
        if twice:
            more = f", and {len(twice) - MAX_NAMED} more" if len(twice) > MAX_NAMED else ""
            raise ValueError(f"{self.name}: each custom_id must be unique: {'; '.join(twice[:MAX_NAMED])}{more}")
        return count
