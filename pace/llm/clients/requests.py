"""Generations on their way through the engine: one that others look at, one piece by piece, and a whole batch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pace.llm.clients.streamer import Feed
from pace.llm.decoding.detokenizer import REPLACEMENT, TextPieces, decode
from pace.llm.engine.engine import Engine
from pace.llm.outputs import GenerateOutput
from pace.llm.sequence import Sequence


class Request:
    """One prompt among those that the engine works on; made by `LLMModel.add_request`.

    It advances with every step of the engine, whoever asks for it: a thread that waits for this request (by `result`,
    or by iterating), or one that generates something else. Without any it stands still. Any thread may look, wait,
    iterate and cancel, several at once. A request that nobody holds any more is cancelled.
    """

    _engine: Engine | None = None  # where Ctrl-C strikes before it has one

    def __init__(
        self,
        engine: Engine,
        sequence: Sequence,
        priority: int,
        tokenizer: Any,
        stop_strings: list[str] | None,
        output_of: Callable[[Sequence], GenerateOutput],
    ) -> None:
        self._sequence = sequence
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._output_of = output_of
        engine.add_request(sequence, priority)

    @property
    def tokens(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self._sequence.generated

    @property
    def text(self) -> str:
        """The text of the tokens so far; "" without a tokenizer. What may become a stop string is only cut off at the
        end."""
        if self._tokenizer is None:
            return ""
        is_done = self.done  # before the tokens
        text = self._sequence.stopping.trim(decode(self._tokenizer, self.tokens))
        return text if is_done else text.rstrip(REPLACEMENT)

    @property
    def done(self) -> bool:
        """True once nothing more comes."""
        return self._sequence.is_finished

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "cancelled", "error" (which `result` raises), or None while it goes on."""
        return self._sequence.finish_reason

    def cancel(self) -> None:
        """Ends it with the tokens it has, and gives its memory back. Waits for the step under way; harmless where it is
        done."""
        self._engine.abort([self._sequence])

    def result(self, timeout: float | None = None) -> GenerateOutput:
        """Steps the engine until this request is done; its output, as of `generate`, of one row.

        Raises TimeoutError after `timeout` seconds, looked at between steps (the request goes on, and may be asked
        again), and what went wrong with the request itself.
        """
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
            raise TypeError(
                f"timeout must be a number of seconds, or None to wait for as long as it takes; got {timeout!r}"
            )
        deadline = math.inf if timeout is None else time.perf_counter() + timeout
        self._wait(self._sequence.max_length, deadline)
        return self._output_of(self._sequence)

    def __iter__(self) -> Iterator[str]:
        """The text in pieces, from its beginning, as they come. Leaving the loop early leaves the request running."""
        if self._tokenizer is None:
            raise ValueError(
                "pieces of text need a tokenizer, and this model has none; look at tokens, or wait for result()"
            )
        return self._pieces()

    def _pieces(self) -> Iterator[str]:
        pieces = TextPieces(self._tokenizer, self._stop_strings)
        index = self._sequence.num_prompt_tokens
        while self._wait(index):
            piece = pieces.push(self._sequence.tokens[index])
            index += 1
            if piece:
                yield piece
        if piece := pieces.flush():
            yield piece

    def _wait(self, index: int, deadline: float = math.inf) -> bool:
        """Steps until there is a token at `index`, prompt included, or it is clear that none comes, which is False."""
        sequence = self._sequence
        while len(sequence.tokens) <= index:
            if sequence.is_finished and len(sequence.tokens) <= index:  # again: another thread may be stepping
                if sequence.error is not None:
                    raise sequence.error
                return False
            if time.perf_counter() >= deadline:
                raise TimeoutError(
                    f"the request is not done in time: {sequence.num_generated} tokens so far; ask again, or cancel it"
                )
            self._engine.step()
        return True

    def __del__(self) -> None:
        # No lock here: a collection may happen inside a step of this very thread.
        if self._engine is not None:
            self._engine.discard_later(self._sequence)


class Stream:
    """The text of one generation, piece by piece. It starts with the first piece; closing or dropping it ends it.

    No generator function: one that is dropped in a reference cycle is closed wherever the garbage collector strikes, be
    it in the middle of a step, and there it must not wait for the engine's lock.
    """

    def __init__(self, start: Callable[[], Request]) -> None:
        self._start: Callable[[], Request] | None = start
        self._request: Request | None = None
        self._pieces: Iterator[str] = iter(())

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        try:
            if self._start is not None:
                self._start, self._request = None, self._start()
                self._pieces = iter(self._request)
            piece = next(self._pieces, None)
        except BaseException:
            self.close()
            raise
        if piece is None:
            self.close()
            raise StopIteration
        return piece

    def close(self) -> None:
        """Ends the generation, if it has not ended. Closing twice is harmless."""
        self._start, self._pieces = None, iter(())
        if self._request is not None:
            self._request.cancel()


class Batch:
    """The rows of one call of `generate`.

    However many they are, the engine has only about as many of them at a time as run in a step, so that neither what
    sequences keep beside their tokens (processors' states, say) nor the wait of other calls' requests grows with the
    batch.
    """

    def __init__(self, engine: Engine, groups: Iterator[list[Sequence]], feed: Feed, cancel: threading.Event) -> None:
        """`groups` makes the sequences of the next prompt when it is asked; the first of them shares its prompt with
        the others."""
        self.engine = engine
        self.groups = groups
        self.feed = feed
        self.cancel = cancel
        self.rows: list[Sequence] = []
        """In order; those that have ended are their outcomes."""
        self._live: list[int] = []
        self._num_told: list[int] = []

    def run(self, prompts: list[list[int]]) -> None:
        """Steps the engine until all rows have ended; tells the feed the `prompts` of all and how they go. However it
        ends, nothing of them stays in the engine."""
        is_cancelled = self.feed.start(prompts) is False
        try:
            while True:
                is_cancelled = is_cancelled or self.cancel.is_set()
                self._refill(is_cancelled)
                if not self._live:
                    return
                if is_cancelled:
                    self._abort()
                else:
                    self.engine.step()
                self._live = [row for row in self._live if self._tell(row)]
        finally:
            self._abort()

    def _refill(self, is_cancelled: bool) -> None:
        """Makes and submits sequences while there are fewer than run in a step; in a cancelled batch makes all that are
        left."""
        while is_cancelled or self._has_room():
            group = next(self.groups, None)
            if group is None:
                return
            first = len(self.rows)
            self._num_told += [len(sequence.tokens) for sequence in group]
            self.rows += group
            self._live += range(
                first, len(self.rows)
            )  # once they are there: Ctrl-C may strike in between, and `_abort` looks them up
            if not is_cancelled:
                self._submit(group)

    def _has_room(self) -> bool:
        return len(self._live) < self.engine.scheduler.max_sequences_per_step

    def _submit(self, group: list[Sequence]) -> None:
        self.engine.submit(group)

    def _tell(self, row: int) -> bool:
        """Tells the feed what is new of a row; False where the row has ended."""
        sequence = self.rows[row]
        is_finished = sequence.is_finished  # before the tokens: another thread may be stepping
        while self._num_told[row] < len(sequence.tokens):
            self._num_told[row] += 1
            if self.feed.token(row, sequence.tokens[self._num_told[row] - 1]) is False:
                self._cut(sequence, self._num_told[row])
                is_finished = True
        if sequence.error is not None:
            raise sequence.error
        if is_finished:
            self.rows[row] = sequence.outcome()
            self.feed.finished(row, sequence.finish_reason)
        return not is_finished

    def _cut(self, sequence: Sequence, num_tokens: int) -> None:
        """Ends a row with the last token that was told. A step may have brought more, several by drafts or other
        threads' steps."""
        self.engine.abort([sequence])
        if len(sequence.tokens) > num_tokens:
            del sequence.tokens[num_tokens:]
            sequence.finish_reason = "cancelled"

    def _abort(self) -> None:
        self.engine.abort([self.rows[row] for row in self._live])
