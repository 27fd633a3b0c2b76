"""Rows of the engine for the event loop: the engine's thread writes them, the event loop reads them."""

from __future__ import annotations

from collections.abc import Callable

from pace.llm.sequence import Sequence, TokenLogprob


class Row:
    """Tokens of one sequence, a `TokenSink` and a `Reader`. The engine's thread appends tokens and ends it; tokens are
    never rolled back."""

    def __init__(self, sequence: Sequence, notify: Callable[[Row, bool], None]) -> None:
        self.sequence = sequence
        self.tokens: list[tuple[int, TokenLogprob | None]] = []
        self.is_dirty = False
        self.is_ended = False
        self.error: BaseException | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called on the loop when there is something new."""
        self._notify = notify

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        self.tokens.append((token, logprob))
        self._notify(self, len(self.tokens) == 1)

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        self.error = error
        self.is_ended = True
        self._notify(self, True)
