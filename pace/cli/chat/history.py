"""Lines typed at `pace chat` in earlier runs."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from pace import env

logger = logging.getLogger("pace")

MOST_ENTRIES = 1000


class History:
    """A file with mode 0600 that holds one JSON string per line, so that an entry may have several lines.

    Several processes may append at once. If the file cannot be read or written, one warning is logged and no history is
    kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_usable = True
        self._last: str | None = None

    @classmethod
    def of_user(cls) -> History | None:
        """The history in `pace/chat_history` of the user's state directory; None without such a directory."""
        directory = env.state_directory()
        return cls(directory / "chat_history") if directory else None

    def read(self) -> list[str]:
        """Returns the last `MOST_ENTRIES` entries, oldest first. Lines that are not JSON strings are skipped."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self._give_up(error)
            return []
        entries = [text for text in map(_entry, lines[-MOST_ENTRIES:]) if text is not None]
        if len(lines) > 2 * MOST_ENTRIES:
            self._write(entries)
        self._last = entries[-1] if entries else None
        return entries

    def add(self, text: str) -> None:
        """Adds an entry unless it equals the last one."""
        if not self._is_usable or text == self._last:
            return
        self._last = text
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as file:
                file.write(json.dumps(text) + "\n")
        except OSError as error:
            self._give_up(error)

    def _write(self, entries: list[str]) -> None:
        """Replaces the file with one that holds only these entries."""
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.writelines(json.dumps(text) + "\n" for text in entries)
            beside.replace(self.path)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_usable = False
        logger.warning("your input is not saved for the next run: %s", error)


def _entry(line: str) -> str | None:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) and "\0" not in text else None
