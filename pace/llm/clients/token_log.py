"""Log of generated tokens: the engine's thread writes it, clients read it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from pace.llm.clients.notifiers import Notifier, ThreadNotifier
from pace.llm.sequence import Sequence, TokenLogprob


@dataclass(slots=True)
class TokenEvent:
    """A generated token of one row, a rollback, or the row's end. Never modified; a frozen dataclass would take three
    times as long to make."""

    row: int
    token: int | None = None
    """None for a rollback and at the end."""
    logprob: TokenLogprob | None = None
    num_removed: int = 0
    """Number of the row's last tokens that a step callback has rolled back."""
    finish_reason: str | None = None
    """Set at the end."""
    error: BaseException | None = None
    """The row's error, at the end."""
    num_tokens: int = 0
    """Number of the row's generated tokens, at the end."""


class TokenLog:
    """Sink of several sequences, the rows of one call. Records their events in order, and notifies readers."""

    def __init__(self, wants_tokens: bool = True) -> None:
        """Without `wants_tokens` only ends are recorded, and no reader is woken for a token."""
        self.wants_tokens = wants_tokens
        self.events: list[TokenEvent] = []
        """Only grows, except by `drain`."""
        self.num_ended = 0
        self.error: BaseException | None = None
        """The first error of a row."""
        self.threads = ThreadNotifier()
        """Notifies threads of each event."""
        self.completion = ThreadNotifier()
        """Notifies threads when all rows have ended."""
        self._notifiers: tuple[Notifier, ...] = (self.threads,)
        self._lock = threading.Lock()
        self._rows: dict[int, int] = {}

    def add(self, sequence: Sequence) -> int:
        """Records the events of a sequence from now on. Returns its row: sequences are counted in the order in which
        they are added."""
        row = self._rows[sequence.id] = len(self._rows)
        sequence.report_to(self)
        return row

    @property
    def is_complete(self) -> bool:
        """True if all rows have ended."""
        return self.num_ended == len(self._rows)

    def subscribe(self, notifier: Notifier) -> None:
        """Notifies `notifier` of events from now on."""
        with self._lock:
            self._notifiers = (*self._notifiers, notifier)

    @contextlib.contextmanager
    def subscribed(self, notifier: Notifier) -> Iterator[None]:
        """Notifies `notifier` of events for the duration of the block."""
        self.subscribe(notifier)
        try:
            yield
        finally:
            with self._lock:
                self._notifiers = tuple(other for other in self._notifiers if other is not notifier)

    def drain(self) -> list[TokenEvent]:
        """Waits for events, and returns all of them. The log forgets them, so there must be no other reader."""
        self.threads.wait_for(lambda: bool(self.events))
        events = self.events[:]
        del self.events[: len(events)]
        return events

    # -- methods of `TokenSink`, called on the engine's thread ---------------------------------------------------------

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        if self.wants_tokens:
            self._record(TokenEvent(self._rows[sequence.id], token, logprob), sequence.num_generated == 1)

    def rollback(self, sequence: Sequence, num_tokens: int) -> None:
        if self.wants_tokens:
            self._record(TokenEvent(self._rows[sequence.id], num_removed=num_tokens), False)

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        self.error = self.error or error
        self.num_ended += 1
        row, num_tokens = self._rows[sequence.id], sequence.num_generated
        self._record(TokenEvent(row, finish_reason=reason, error=error, num_tokens=num_tokens), True)
        if self.is_complete:
            self.completion.notify(True)

    def _record(self, event: TokenEvent, is_urgent: bool) -> None:
        self.events.append(event)
        for notifier in self._notifiers:
            notifier.notify(is_urgent)
