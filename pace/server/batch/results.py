"""The output of a batch: one result per line, in order of completion. A run after a killed one continues there."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
import uuid
from pathlib import Path
from typing import Any

from pace.server.batch.lines import Line
from pace.server.wire.form import dumps

BEGINNING = b'{"id":"batch_req_'
"""First bytes of every line: other data at the end of a file is not ours, and is not cut off."""
SYNC_SECONDS = 1.0
"""Results written within this time before a power failure may be lost. A killed process loses none."""


def answered(line: Line, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of a request: an answer, or its error."""
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
    return _result(line, response, None)


def refused(line: Line) -> dict[str, Any]:
    """Returns the result of an invalid line."""
    error = {"code": line.error.code, "message": line.error.message, "param": None, "line": line.number}
    return _result(line, None, error)


def _result(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    identity = f"batch_req_{uuid.uuid4().hex}"
    return {"id": identity, "custom_id": line.custom_id, "response": response, "error": error}


class Results:
    """A file to which results are appended, each in one write. Only one process at a time may have it open."""

    def __init__(self, descriptor: int, is_file: bool) -> None:
        self._descriptor = descriptor
        self._is_file = is_file
        self._synced = time.monotonic()
        self._is_failed: dict[str | int, bool] = {}
        """True for each result so far that is an error, by custom_id, or by the number of a line without one."""

    @classmethod
    def open(cls, path: Path) -> Results:
        """Opens `path` for the rest of a batch: reads the results so far, and cuts off an incomplete last line.

        Raises OSError. Raises ValueError if another process has the file open, or if it holds anything but results; it
        is then unchanged."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        results = cls(descriptor, stat.S_ISREG(os.fstat(descriptor).st_mode))
        try:
            if results._is_file:
                results._lock(path)
                results._read_done(path)
        except BaseException:
            os.close(descriptor)
            raise
        return results

    @classmethod
    def to(cls, descriptor: int) -> Results:
        """Returns results for a stream, such as stdout, which is closed with the object."""
        return cls(descriptor, False)

    def has(self, line: Line) -> bool:
        """True if an earlier run has a result for this line."""
        return _key(line) in self._is_failed

    def has_failed(self, line: Line) -> bool:
        """True if an earlier run has an error for this line."""
        return self._is_failed.get(_key(line), False)

    def append(self, result: dict[str, Any]) -> None:
        """Appends a result. Raises OSError if the disk is full, or the reader of a stream has gone."""
        rest = memoryview(dumps(result) + b"\n")
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flushes written results to disk."""
        if self._is_file:
            os.fsync(self._descriptor)
        self._synced = time.monotonic()

    def close(self) -> None:
        self.sync()
        os.close(self._descriptor)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another process is writing results there") from None

    def _read_done(self, path: Path) -> None:
        end = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    if not (data.startswith(BEGINNING) or BEGINNING.startswith(data)):
                        raise _foreign(path, number)
                    os.ftruncate(self._descriptor, end)
                    return
                self._read_result(data, path, number)
                end += len(data)

    def _read_result(self, data: bytes, path: Path, number: int) -> None:
        try:
            result = json.loads(data)
            custom_id, error, response = result["custom_id"], result["error"], result["response"]
            key = error["line"] if custom_id is None else custom_id
            self._is_failed[key] = error is not None or response["status_code"] != 200
        except (KeyError, TypeError, ValueError):
            raise _foreign(path, number) from None


def _key(line: Line) -> str | int:
    return line.number if line.custom_id is None else line.custom_id


def _foreign(path: Path, number: int) -> ValueError:
    return ValueError(f"{path}: line {number} is not a result of a batch; give a new file, or a file of results")
