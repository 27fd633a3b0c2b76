"""Keys typed while an answer is written. Complete lines are sent next; an unfinished line is kept for the next
prompt."""

from __future__ import annotations

import re
from collections import deque

KEYS = re.compile(
    r"\x1b\[200~(?P<paste>.*?)(?:\x1b\[201~|\Z)"
    r"|\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.|\Z)"
    r"|(?P<key>.)",
    re.DOTALL,
)
BACKSPACE, END_OF_INPUT, KILL_LINE, KILL_WORD = "\x7f\b", "\x04", "\x15", "\x17"


class TypedAhead:
    """Edits typed keys into lines, the last of them unfinished, as a terminal does."""

    def __init__(self) -> None:
        self.lines: deque[str | None] = deque()
        """Complete lines, oldest first; None stands for the end of the input."""
        self.begun = ""
        """The beginning of the next line."""

    def add(self, keys: str) -> None:
        """Adds keys as a terminal sends them. Pastes are kept whole; Ctrl-U, Ctrl-W and backspace edit the line."""
        for match in KEYS.finditer(keys):
            if match["paste"] is not None:
                self.begun += match["paste"].replace("\r", "\n")
            elif match["key"] is not None:
                self._add_key(match["key"])

    def _add_key(self, key: str) -> None:
        if key in "\r\n":
            self.lines.append(self.begun)
            self.begun = ""
        elif key in BACKSPACE:
            self.begun = self.begun[:-1]
        elif key == KILL_LINE:
            self.begun = ""
        elif key == KILL_WORD:
            self.begun = re.sub(r"\S*\s*\Z", "", self.begun, count=1)
        elif key == END_OF_INPUT and not self.begun:
            self.lines.append(None)
        elif key.isprintable() or key == "\t":
            self.begun += key

    def clear(self) -> None:
        """Removes all lines."""
        self.lines.clear()
        self.begun = ""
