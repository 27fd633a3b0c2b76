"""Batches: the rows of one call of `generate`, submitted as there is room, with their events for a streamer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from pace.llm.clients.streamer import Streamer
from pace.llm.clients.token_log import TokenEvent, TokenLog
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.sequence import Sequence


class Batch:
    """Runs all rows of one call.

    The engine holds at most twice the number of rows of a step, so that new rows are ready when others end. So the
    state of sequences (of processors, say) and the wait of other calls' requests do not grow with the batch. The
    streamer is called on the caller's thread.
    """

    def __init__(
        self, driver: EngineDriver, groups: Iterator[list[Sequence]], streamer: Streamer, cancel: threading.Event | None
    ) -> None:
        """`groups` yields the sequences of one prompt at a time, and creates them on demand. The first of them shares
        its prompt with the others. `cancel` ends the batch after the current step once any thread sets it."""
        self.driver = driver
        self.groups = groups
        self.streamer = streamer
        self.cancel = cancel
        self.rows: list[Sequence] = []
        """In order. Finished rows are their `Sequence.outcome()`."""
        self._cancel_error: BaseException | None = None
        self._log = TokenLog(streamer.wants_tokens)
        self._live: dict[int, list[int]] = {}
        """Rows that have not ended, and the tokens that the streamer got."""
        self._cut: set[int] = set()
        """Live rows that the streamer cancelled."""

    def run(self, prompts: list[list[int]]) -> None:
        """Runs all rows to their ends, and passes all `prompts` and then the events of the rows to the streamer. Leaves
        nothing in the engine, even after an error."""
        is_cancelled = self.streamer.on_start(prompts) is False
        try:
            if self.cancel is not None:
                self.driver.call(lambda engine: engine.between_steps.append(self._look_at_cancel))
            self._refill(is_cancelled)
            while self._live:
                self.driver.start()  # needed after a fork() in a streamer
                for event in self._log.drain():
                    self._read(event)
                    self._refill(is_cancelled)
        finally:
            self._leave()

    def _refill(self, is_cancelled: bool) -> None:
        """Makes and submits sequences while there is room. In a cancelled batch, makes all that are left, which end
        before they begin."""
        is_cancelled = is_cancelled or (self.cancel is not None and self.cancel.is_set())
        while is_cancelled or self._has_room():
            group = next(self.groups, None)
            if group is None:
                return
            self.rows += group
            for sequence in group:
                self._live[self._log.add(sequence)] = []
            if is_cancelled:
                for sequence in group:
                    sequence.finish_reason = "cancelled"
                    self._log.end(sequence, "cancelled", None)
            else:
                self._submit(group)

    def _has_room(self) -> bool:
        return len(self._live) < 2 * self.driver.engine.scheduler.max_sequences_per_step

    def _submit(self, group: list[Sequence]) -> None:
        self.driver.submit(group)

    def _read(self, event: TokenEvent) -> None:
        if self._cancel_error is not None:
            raise self._cancel_error
        row, tokens = event.row, self._live[event.row]
        if event.finish_reason is not None:
            self._conclude(row)
        elif row in self._cut:
            return
        elif event.num_removed:
            del tokens[-event.num_removed :]
            self.streamer.on_event(event)
        else:
            tokens.append(event.token)
            if self.streamer.on_event(event) is False:
                self._cut.add(row)
                self.driver.abort([self.rows[row]])

    def _conclude(self, row: int) -> None:
        sequence, tokens, is_cut = self.rows[row], self._live[row], row in self._cut
        if sequence.error is not None and not is_cut:
            raise sequence.error
        del self._live[row]
        if is_cut and (sequence.error is not None or tokens != sequence.generated):
            # it continued until the abort arrived, or was revised
            pairs = enumerate(zip(tokens, sequence.generated))
            num_kept = next((index for index, (a, b) in pairs if a != b), min(len(tokens), sequence.num_generated))
            sequence.rollback(num_kept)
            sequence.tokens += tokens[num_kept:]
            sequence.finish_reason, sequence.error = "cancelled", None
        self.rows[row] = sequence.outcome()
        end = TokenEvent(row, finish_reason=sequence.finish_reason, num_tokens=sequence.num_generated)
        self.streamer.on_event(end)

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
        engine.abort([self.rows[row] for row in list(self._live)])

    def _leave(self) -> None:
        if self._live:
            self.driver.tidy(self._end_rows)
        if self.cancel is not None:
            self.driver.tidy(self._unhook)
