"""Server-sent events from bytes as they come."""

from __future__ import annotations


class EventParser:
    """Reads the data of events, however their bytes are cut. Names of events, comments and retries are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that `data` completes; of several lines, with newlines between."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._lines.append(line[5:].removeprefix(b" "))
            elif not line and self._lines:
                events.append(b"\n".join(self._lines))
                self._lines = []
        return events
