"""Where a conversation is written: answers to stdout, and all else to stderr, each on lines of its own."""

from __future__ import annotations

import sys


class Screen:
    """Knows whether an answer stands on the line that is being written."""

    def __init__(self) -> None:
        self._is_open = False

    def write(self, piece: str) -> None:
        """Writes a piece of an answer at once."""
        self._is_open = True
        print(piece, end="", flush=True)

    def end_line(self) -> None:
        """Ends an answer, if there is one."""
        if self._is_open:
            self._is_open = False
            print(flush=True)

    def notice(self, text: str) -> None:
        """Writes what is no part of an answer, so that stdout holds the answers and nothing else."""
        self.end_line()
        print(text, file=sys.stderr, flush=True)
