"""Output of a conversation: answers on stdout, everything else on stderr, on separate lines."""

from __future__ import annotations

import sys


class Screen:
    """Tracks if the current line holds part of an answer."""

    def __init__(self) -> None:
        self._is_open = False

    def write(self, piece: str) -> None:
        """Writes a piece of an answer and flushes it."""
        self._is_open = True
        print(piece, end="", flush=True)

    def end_line(self) -> None:
        """Ends the line of an answer, if there is one."""
        if self._is_open:
            self._is_open = False
            print(flush=True)

    def notice(self, text: str) -> None:
        """Writes a message that is not part of an answer to stderr, so that stdout holds only answers."""
        self.end_line()
        print(text, file=sys.stderr, flush=True)
