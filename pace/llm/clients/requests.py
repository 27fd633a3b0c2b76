"""Requests: one prompt with one or several continuations, which can be inspected, awaited and streamed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

from pace.llm.clients.notifiers import LoopNotifier, ThreadNotifier
from pace.llm.clients.streamer import StreamEvent, TextPiece
from pace.llm.clients.token_log import TokenLog
from pace.llm.engine.driver import EngineDriver
from pace.llm.outputs import GenerateOutput
from pace.llm.sequence import Sequence
from pace.llm.text.detokenizer import REPLACEMENT
from pace.llm.text.reader import TextReader

MAX_EVENTS_PER_TURN = 32
"""Events that a task takes before other tasks of its loop get a turn."""


class LogReader:
    """Reads a log from its beginning, at its own pace."""

    def __init__(self, log: TokenLog, texts: list[TextReader]) -> None:
        """`texts` has one entry for each row."""
        self._events = log.events
        self._texts = texts
        self._index = 0
        self._num_open = len(texts)

    @property
    def is_done(self) -> bool:
        """True if all rows have been read to their end."""
        return self._num_open == 0

    def has_more(self) -> bool:
        """True if there is an event to take."""
        return self._index < len(self._events)

    def take(self) -> StreamEvent:
        """Returns the next event. Raises the row's error at its end."""
        event = self._events[self._index]
        self._index += 1
        if event.finish_reason is not None:
            self._num_open -= 1
        if event.error is not None:
            raise event.error
        return StreamEvent.of(event, self._texts[event.row])


class Choice:
    """One continuation of a request's prompt."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    @property
    def tokens(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self._sequence.generated

    @property
    def text(self) -> str:
        """The text of the tokens so far; "" without a tokenizer. A stop string is only cut off at the end."""
        reader = self._sequence.stopping.text
        if self.done:
            return reader.text_of(self._sequence.generated)
        return reader.fresh().text_of(self._sequence.generated).rstrip(REPLACEMENT)

    @property
    def done(self) -> bool:
        """True once the continuation has ended."""
        return self._sequence.is_finished

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "cancelled", "error" (which `result` raises), or None before the end."""
        return self._sequence.finish_reason


class Request:
    """One prompt that the engine works on; made by `LLMModel.add_request`.

    It advances by itself. Any number of threads, and tasks of event loops (`async for`), may read, wait, iterate and
    cancel at once. A request without references is cancelled.
    """

    def __init__(
        self,
        driver: EngineDriver,
        sequences: list[Sequence],
        output_of: Callable[[list[Sequence]], GenerateOutput],
    ) -> None:
        """`sequences` continue the same prompt; `output_of` makes an output of them once they are done."""
        self._driver = driver
        self._sequences = sequences
        self._output_of = output_of
        self._log = TokenLog()
        self.choices = [Choice(sequence) for sequence in sequences]
        """The continuations, `num_return_sequences` of them."""
        for sequence in sequences:
            self._log.add(sequence)
        driver.submit(sequences)

    @property
    def tokens(self) -> list[int]:
        """`Choice.tokens` of a request with one continuation. Like the next two properties, raises ValueError for
        several."""
        return self._only.tokens

    @property
    def text(self) -> str:
        """`Choice.text`."""
        return self._only.text

    @property
    def finish_reason(self) -> str | None:
        """`Choice.finish_reason`."""
        return self._only.finish_reason

    @property
    def done(self) -> bool:
        """True once all continuations have ended."""
        return self._log.is_complete

    def cancel(self) -> None:
        """Ends the request with the tokens it has, and frees its memory after the current step. Does not wait; harmless
        if it is done."""
        self._driver.abort(self._sequences)

    def result(self, timeout: float | None = None) -> GenerateOutput:
        """Waits until the request is done. Returns its output, as `generate` does, with a row for each continuation.

        Raises TimeoutError after `timeout` seconds; the request continues, and `result` may be called again. Raises the
        request's own error, if any.
        """
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
            raise TypeError(
                f"timeout must be a number of seconds, or None to wait for as long as it takes; got {timeout!r}"
            )
        deadline = None if timeout is None else time.perf_counter() + timeout
        if not self._wait(self._log.completion, lambda: self._log.is_complete, deadline):
            num_tokens = sum(sequence.num_generated for sequence in self._sequences)
            raise TimeoutError(
                f"the request is not done after {timeout:g} seconds: {num_tokens} tokens so far; call result() again, "
                f"or cancel() it"
            )
        if self._log.error is not None:
            raise self._log.error
        return self._output_of(self._sequences)

    def __iter__(self) -> Iterator[str]:
        """Iterates over the text of the only continuation in pieces, from its beginning. Leaving the loop early leaves
        the request running. Pieces are `TextPiece`, which report text that a step callback rolled back."""
        self._check_tokenizer()
        return (TextPiece.of(event) for event in self.events() if event.text or event.num_chars_taken_back)

    def events(self, with_text: bool = True) -> Iterator[StreamEvent]:
        """Iterates over the events of all continuations from the beginning, in the order in which they occur. There is
        one for each token with its text and log-probability (if requested), for each rollback by a step callback, and
        for each end. Without `with_text` texts are "". Raises the request's error."""
        reader = self._reader(with_text)
        while not reader.is_done:
            self._wait(self._log.threads, reader.has_more)
            yield reader.take()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Iterates over the same pieces as `iter`, for a task of an event loop."""
        self._check_tokenizer()
        async with contextlib.aclosing(self.aevents()) as events:
            async for event in events:
                if event.text or event.num_chars_taken_back:
                    yield TextPiece.of(event)

    async def aevents(self, with_text: bool = True) -> AsyncIterator[StreamEvent]:
        """Iterates over the same events as `events`, for a task of an event loop, without blocking the loop. The loop
        is woken once after a step, for all requests, and at most about a hundred times a second."""
        reader, num_taken = self._reader(with_text), 0
        notifier = LoopNotifier()
        with self._log.subscribed(notifier):
            while not reader.is_done:
                if not reader.has_more():
                    self._check_going()
                    await notifier.wait_for(reader.has_more)
                elif num_taken % MAX_EVENTS_PER_TURN == 0:
                    await asyncio.sleep(0)
                num_taken += 1
                yield reader.take()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _only(self) -> Choice:
        self._check_one()
        return self.choices[0]

    def _check_one(self) -> None:
        if len(self.choices) > 1:
            raise ValueError(f"this request has {len(self.choices)} continuations; use `choices` or events()")

    def _check_tokenizer(self) -> None:
        if self._sequences[0].stopping.text.tokenizer is None:
            raise ValueError("pieces of text need a tokenizer, but this model has none; use `tokens` or result()")
        self._check_one()

    def _reader(self, with_text: bool) -> LogReader:
        make = lambda text: text.fresh() if with_text else TextReader(None)
        return LogReader(self._log, [make(sequence.stopping.text) for sequence in self._sequences])

    def _wait(self, notifier: ThreadNotifier, condition: Callable[[], bool], deadline: float | None = None) -> bool:
        if condition():
            return True
        self._check_going()
        return notifier.wait_for(condition, deadline)

    def _check_going(self) -> None:
        """Raises on the engine's own thread, which must not wait. Restarts the engine's thread after `fork()`."""
        self._driver.check_outside()
        self._driver.start()

    def __del__(self) -> None:
        if (log := getattr(self, "_log", None)) and not log.is_complete:  # if the constructor got that far
            self._driver.abort(self._sequences)


class Stream:
    """The text of one generation, piece by piece. Starts with the first piece; closing or dropping it ends the
    generation."""

    def __init__(self, start: Callable[[], Request]) -> None:
        self._start: Callable[[], Request] | None = start
        self._request: Request | None = None
        self._pieces: Iterator[str] = iter(())

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        if self._start is not None:
            start, self._start = self._start, None
            self._request = start()
            self._pieces = iter(self._request)
        try:
            return next(self._pieces)
        except BaseException:  # also at its end
            self.close()
            raise

    def close(self) -> None:
        """Ends the generation, if it has not ended. Closing twice is harmless."""
        self._start, self._pieces = None, iter(())
        if self._request is not None:
            self._request.cancel()
