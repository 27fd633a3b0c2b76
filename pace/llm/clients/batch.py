"""Batches: the rows of one call of `generate`, submitted as there is room, with events for a feed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from pace.llm.clients.streamer import Feed
from pace.llm.clients.waiting import Waiters
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.sequence import Sequence, TakenBack, TokenLogprob


class Mail:
    """Sink of a batch's sequences: a queue that the caller's thread empties. Wakes it once for each row, and for each
    token if tokens are wanted."""

    def __init__(self, wants_tokens: bool) -> None:
        self.wants_tokens = wants_tokens
        self._letters: deque[tuple[Sequence, int | TakenBack | None, TokenLogprob | None]] = deque()
        self._waiters = Waiters()

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        if self.wants_tokens:
            self._letters.append((sequence, token, logprob))
            self._waiters.wake()

    def taken_back(self, sequence: Sequence, num_tokens: int) -> None:
        if self.wants_tokens:
            self._letters.append((sequence, TakenBack(num_tokens), None))
            self._waiters.wake()

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        self._letters.append((sequence, None, None))
        self._waiters.wake_at_once()

    def get(self) -> tuple[Sequence, int | TakenBack | None, TokenLogprob | None]:
        """Waits for the next event: a sequence's token with its log-probability, a rollback, or its end."""
        self._waiters.wait_for(lambda: bool(self._letters))
        return self._letters.popleft()


class Batch:
    """Runs all rows of one call.

    The engine holds at most twice the number of rows of a step, so that new rows are ready when others end. So the
    state of sequences (of processors, say) and the wait of other calls' requests do not grow with the batch. The feed
    is called on the caller's thread.
    """

    def __init__(
        self, driver: EngineDriver, groups: Iterator[list[Sequence]], feed: Feed, cancel: threading.Event | None
    ) -> None:
        """`groups` creates the sequences of the next prompt on demand; the first of them shares its prompt with the
        others. `cancel` ends the batch after the current step once it is set, by any thread."""
        self.driver = driver
        self.groups = groups
        self.feed = feed
        self.cancel = cancel
        self.rows: list[Sequence] = []
        """In order. Finished rows are their `Sequence.outcome()`."""
        self._cancel_error: BaseException | None = None
        self._mail = Mail(feed.wants_tokens)
        self._live: dict[Sequence, int] = {}
        self._cut: dict[Sequence, list[int]] = {}
        """Generated tokens of rows that the feed cancelled."""
        self._told: dict[Sequence, list[int]] = {}

    def run(self, prompts: list[list[int]]) -> None:
        """Runs all rows to their ends, and passes all `prompts` and then the events of the rows to the feed. Leaves
        nothing in the engine, even after an error."""
        is_cancelled = self.feed.start(prompts) is False
        try:
            if self.cancel is not None:
                self.driver.call(lambda engine: engine.between_steps.append(self._look_at_cancel))
            while True:
                is_cancelled = is_cancelled or (self.cancel is not None and self.cancel.is_set())
                self._refill(is_cancelled)
                if not self._live:
                    return
                self.driver.start()  # needed after a fork() in a streamer
                self._read(*self._mail.get())
        finally:
            self._leave()

    def _refill(self, is_cancelled: bool) -> None:
        """Makes and submits sequences while there is room. In a cancelled batch, makes all that are left, which end
        before they begin."""
        while is_cancelled or self._has_room():
            group = next(self.groups, None)
            if group is None:
                return
            first = len(self.rows)
            self.rows += group
            for row, sequence in enumerate(group, first):
                sequence.report_to(self._mail)
                self._live[sequence] = row
                self._told[sequence] = []
            if is_cancelled:
                for sequence in group:
                    sequence.finish_reason = "cancelled"
                    self._mail.end(sequence, "cancelled", None)
            else:
                self._submit(group)

    def _has_room(self) -> bool:
        return len(self._live) < 2 * self.driver.engine.scheduler.max_sequences_per_step

    def _submit(self, group: list[Sequence]) -> None:
        self.driver.submit(group)

    def _read(self, sequence: Sequence, token: int | TakenBack | None, logprob: TokenLogprob | None) -> None:
        """Handles one event: a token, a rollback, or the end of a row."""
        if self._cancel_error is not None:
            raise self._cancel_error
        row = self._live[sequence]
        if token is None:
            del self._live[sequence]
            self._conclude(row, sequence)
        elif sequence in self._cut:
            return
        elif isinstance(token, TakenBack):
            del self._told[sequence][-token.num_tokens :]
            self.feed.taken_back(row, token.num_tokens)
        else:
            self._told[sequence].append(token)
            if self.feed.token(row, token, logprob) is False:
                self._cut[sequence] = self._told[sequence]
                self.driver.abort([sequence])

    def _conclude(self, row: int, sequence: Sequence) -> None:
        if sequence.error is not None and sequence not in self._cut:
            raise sequence.error
        del self._told[sequence]
        told = self._cut.pop(sequence, None)
        if told is not None and (sequence.error is not None or told != sequence.generated):
            # it continued until the abort arrived, or was revised
            pairs = enumerate(zip(told, sequence.generated))
            num_kept = next((index for index, (a, b) in pairs if a != b), min(len(told), sequence.num_generated))
            sequence.take_back(num_kept)
            sequence.tokens += told[num_kept:]
            sequence.finish_reason, sequence.error = "cancelled", None
        self.rows[row] = sequence.outcome()
        self.feed.finished(row, sequence.finish_reason, sequence.num_generated)

    def _look_at_cancel(self) -> None:
        """Runs between two steps, on the engine's thread."""
        try:
            if self.cancel.is_set():
                self._end_rows(self.driver.engine)
        except BaseException as error:  # an error of the caller's object, raised only to that caller
            self._cancel_error = error
            self._unhook(self.driver.engine)
            self._end_rows(self.driver.engine)

    def _unhook(self, engine: Engine) -> None:
        if self._look_at_cancel in engine.between_steps:
            engine.between_steps.remove(self._look_at_cancel)

    def _end_rows(self, engine: Engine) -> None:
        engine.abort(list(self._live))

    def _leave(self) -> None:
        if self._live:
            self.driver.tidy(self._end_rows)
        if self.cancel is not None:
            self.driver.tidy(self._unhook)
