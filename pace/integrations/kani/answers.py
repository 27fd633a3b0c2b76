"""Running answers in kani's form: pieces of text, then a completion."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import asdict
from typing import Any, Protocol

from kani.engines import Completion

from pace.integrations.kani.messages import as_message
from pace.llm import GenerateOutput, Metrics, TokenLogprob
from pace.llm.chat import Event, Text, Thought
from pace.llm.clients.chat import AnswerReader, ChatAnswer

GREY, PLAIN = "\033[0;37m", "\033[0m"
"""Escape codes around reasoning in a stream, as in kani's parsers."""


class Source(Protocol):
    """Source of the events of an answer."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def outcome(self) -> tuple[str, Metrics, list[TokenLogprob] | None]:
        """Returns the finish reason, statistics and log-probabilities; called after the answer has ended."""
        ...


class Steps:
    """Yields events with each step of the engine. Leaving the iteration ends the generation."""

    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer

    def __aiter__(self) -> AsyncIterator[Event]:
        return aiter(self._answer)

    def outcome(self) -> tuple[str, Metrics, list[TokenLogprob] | None]:
        output = self._answer.output
        return output.finish_reason, output.metrics, output.logprobs


class Beams:
    """Runs a beam search in a thread, and yields all events at its end. Leaving the iteration ends the search."""

    def __init__(self, search: Callable[[threading.Event], GenerateOutput], reader: AnswerReader) -> None:
        """`search` ends after the current step once its event is set."""
        self._search = search
        self._reader = reader
        self._output: GenerateOutput | None = None

    async def __aiter__(self) -> AsyncIterator[Event]:
        cancel = threading.Event()
        try:
            self._output = await asyncio.to_thread(self._search, cancel)
        finally:
            cancel.set()
        for token in [*self._output.generated_token_ids[0], None]:
            for event in self._reader.read(token):
                yield event

    def outcome(self) -> tuple[str, Metrics, list[TokenLogprob] | None]:
        output = self._output
        return output.finish_reasons[0], output.metrics, output.logprobs and output.logprobs[0]


class Answer:
    """One answer. Iterate `pieces` once, then call `completion`."""

    def __init__(self, source: Source, shows_thoughts: bool, markers: Collection[str]) -> None:
        """`markers` are never split between two pieces."""
        self._source = source
        self._shows_thoughts = shows_thoughts
        self._markers = WholeMarkers(markers)
        self._events: list[Event] = []

    async def pieces(self) -> AsyncIterator[str]:
        """Yields text as it is generated, without calls; with reasoning if `shows_thoughts`."""
        is_thought = False
        async with contextlib.aclosing(aiter(self._source)) as events:
            async for event in events:
                self._events.append(event)
                if isinstance(event, Thought) and self._shows_thoughts:
                    yield event.text if is_thought else GREY + event.text
                    is_thought = True
                elif is_thought:
                    yield PLAIN
                    is_thought = False
                if isinstance(event, Text) and (text := self._markers.push(event.text)):
                    yield text
        if rest := self._markers.flush() + PLAIN * is_thought:
            yield rest

    def completion(self) -> Completion:
        """Returns the message and the numbers of prompt and generated tokens, including the end token."""
        reason, metrics, logprobs = self._source.outcome()
        message = as_message(self._events, {"pace": _statistics(reason, metrics, logprobs)})
        return Completion(message, metrics.num_prompt_tokens, metrics.num_generated_tokens)


class WholeMarkers:
    """Splits text into pieces that do not end within a marker, because parsers look for markers in one piece at a
    time."""

    def __init__(self, markers: Collection[str]) -> None:
        self._beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self._longest = max(map(len, markers), default=1) - 1
        self._held = ""

    def push(self, text: str) -> str:
        """Adds text and returns what can be passed on."""
        text, self._held = self._held + text, ""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                text, self._held = text[:-length], text[-length:]
                break
        return text

    def flush(self) -> str:
        """Returns the remaining text at the end."""
        rest, self._held = self._held, ""
        return rest


def _statistics(reason: str, metrics: Metrics, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
    """Returns the value of `ChatMessage.extra["pace"]`: plain values, which kani saves with the chat."""
    passes = metrics.num_generated_tokens - metrics.num_accepted_tokens - metrics.num_forced_tokens
    made: dict[str, Any] = {
        "finish_reason": reason,
        "prompt_tokens": metrics.num_prompt_tokens,
        "cached_prompt_tokens": metrics.num_reused_tokens,
        "completion_tokens": metrics.num_generated_tokens,
        "forward_passes": passes,
        "waiting_ms": round(1e3 * metrics.seconds_waiting, 3),
        "ttft_ms": round(1e3 * metrics.seconds_to_first_token, 3),
        "tok_per_s": round(metrics.decode_tokens_per_second, 3),
    }
    if logprobs is not None:
        made["logprobs"] = [asdict(logprob) for logprob in logprobs]
    return made
