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
REST_SECONDS_PER_ROW = 0.0003
"""More of it with more rows: of a small model, whose steps are shorter than that, 64 streams then cost the engine less
(benchmarks/serving.py)."""


class Wakeups:
    """Wakes the loop for rows that have something new. `notify` is called on the engine's thread, and never waits.

    Between two times the loop rests from tokens, but not from the first one of a row and its end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._dirty: deque[Row] = deque()
        self._is_called = False
        self._rests = False

    def notify(self, row: Row, is_urgent: bool) -> None:
        """Has `row.changed` called on the loop: soon, or after the rest."""
        if not row.is_dirty:
            row.is_dirty = True
            self._dirty.append(row)
        if self._is_called or (self._rests and not is_urgent):
            return
        self._is_called = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody reads any more
            pass

    def _deliver(self) -> None:
        self._is_called = False
        rest = REST_SECONDS + REST_SECONDS_PER_ROW * len(self._dirty)
        while self._dirty:
            row = self._dirty.popleft()
            row.is_dirty = False
            row.changed()
        if not self._rests:
            self._rests = True
            self._loop.call_later(rest, self._end_rest)

    def _end_rest(self) -> None:
        self._rests = False
        if self._dirty:  # looked at after the flag: `notify` looks at the flag after it has added a row
            self._deliver()


class Row:
    """One sequence's tokens as they came. The engine's thread appends, and ends it; nothing is ever taken back."""

    def __init__(self, sequence: Sequence, notify: Callable[[Row, bool], None]) -> None:
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
        self._notify(self, len(self.tokens) == 1)

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        self.error = error
        self.is_ended = True
        self._notify(self, True)
