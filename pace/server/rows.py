"""Rows of the engine as the event loop sees them.

The engine's thread writes rows (`Row` is a `TokenSink`), the event loop reads them. After a step the loop is woken once
for all rows, and then at most every REST_SECONDS: a small model makes dozens of tokens in that time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pace.llm.sequence import Sequence, TokenLogprob

REST_SECONDS = 0.008
"""As `clients/waiting.py` has it, for the same reason."""


class Wakeups:
    """Wakes the loop for rows that have something new. `notify` is called on the engine's thread, and never waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._dirty: deque[Row] = deque()
        self._is_due = False

    def notify(self, row: Row) -> None:
        if not row.is_dirty:
            row.is_dirty = True
            self._dirty.append(row)
        if not self._is_due:
            self._is_due = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody reads any more
                pass

    def _deliver(self) -> None:
        """Tells each row's answer once; then the loop rests from rows for a while."""
        if not self._dirty:
            self._is_due = False
            if self._dirty:  # came between the two lines, and was not told
                self._is_due = True
                self._loop.call_soon(self._deliver)
            return
        while self._dirty:
            row = self._dirty.popleft()
            row.is_dirty = False
            row.changed()
        self._loop.call_later(REST_SECONDS, self._deliver)


class Row:
    """One sequence's tokens as they came. The engine's thread appends, and ends it; nothing is ever taken back."""

    def __init__(self, sequence: Sequence, notify: Callable[[Row], None]) -> None:
        self.sequence = sequence
        self.tokens: list[tuple[int, TokenLogprob | None]] = []
        self.is_dirty = False
        self.is_ended = False
        self.error: BaseException | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called on the loop once there is something new."""
        self._notify = notify

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        self.tokens.append((token, logprob))
        self._notify(self)

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        self.error = error
        self.is_ended = True
        self._notify(self)
