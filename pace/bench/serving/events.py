"""Incremental parser of server-sent events."""

from __future__ import annotations


class EventParser:
    """Parses the data of events from chunks of any size. Names of events, comments and retries are ignored."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of each event that `data` completes. Several data lines of an event are joined with
        newlines."""
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
