"""The input of a batch: a request a line, `{"custom_id", "method", "url", "body"}`."""

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
MOST_NAMED = 5
"""Duplicates named in an error."""


@dataclass(frozen=True)
class LineError:
    """Why a line cannot be run."""

    code: str
    message: str


@dataclass(frozen=True)
class Line:
    """One request, or why the line is none."""

    number: int
    """From 1, as editors count."""
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    error: LineError | None = None


def read_line(data: bytes, number: int) -> Line:
    """Reads one line of an input, of which nothing is trusted."""
    try:
        value = read_json(data, JSON_DEPTH)
    except ApiError as error:
        message = error.message.replace("the body", "the line", 1)
        return Line(number, error=LineError("invalid_json_line", message))
    if not isinstance(value, dict):
        return Line(number, error=LineError("invalid_json_line", "the line is no JSON object"))
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Line(number, error=LineError("missing_required_parameter", "custom_id: must be a string, and not empty"))
    why = _what_is_wrong(value)
    if why is not None:
        return Line(number, custom_id, error=why)
    return Line(number, custom_id, value["url"], value["body"])


def _what_is_wrong(value: dict[str, Any]) -> LineError | None:
    if value.get("method") != "POST":
        return LineError("invalid_method", 'method: must be "POST"')
    if not isinstance(value.get("url"), str):
        return LineError("invalid_url", "url: must be a string, such as /v1/chat/completions")
    if not isinstance(value.get("body"), dict):
        return LineError("invalid_request", "body: must be a JSON object")
    return None


class BatchInput:
    """A file of requests, read twice: to check it, and to run it. In a `with` block; its size does not matter."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """`file` can be read from its start again."""
        self._file = file
        self.name = name

    @classmethod
    def open(cls, path: Path) -> BatchInput:
        """Raises OSError."""
        return cls(path.open("rb"), str(path))

    @classmethod
    def spool(cls, stream: BinaryIO) -> BatchInput:
        """Of a stream that can be read once, such as stdin: kept in a temporary file."""
        file = tempfile.TemporaryFile()
        shutil.copyfileobj(stream, file)
        return cls(file, "stdin")

    def __enter__(self) -> BatchInput:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Line]:
        """The lines, from the first; those without any text are left out."""
        self._file.seek(0)
        for number, data in enumerate(self._file, 1):
            if number == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            if data.strip():
                yield read_line(data, number)

    def check(self) -> int:
        """Number of lines. Raises ValueError where a `custom_id` comes twice: its results could not be told apart."""
        count, first_lines, twice = 0, {}, []
        for line in self:
            count += 1
            if line.custom_id is None:
                continue
            first = first_lines.setdefault(line.custom_id, line.number)
            if first != line.number:
                twice.append(f"{line.custom_id[:40]!r} in lines {first} and {line.number}")
        if twice:
            more = f", and {len(twice) - MOST_NAMED} more" if len(twice) > MOST_NAMED else ""
            raise ValueError(f"{self.name}: a custom_id must come once: {'; '.join(twice[:MOST_NAMED])}{more}")
        return count
