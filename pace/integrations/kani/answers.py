"""Running answers in kani's form: pieces of text, then a completion."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from kani.engines import Completion

from pace.integrations.kani.messages import as_message
from pace.llm import GenerateOutput, Metrics, TokenLogprob
from pace.llm.chat import Event, Text, Thought
from pace.llm.chat.turn import Turn, TurnReader
from pace.llm.clients.chat import ChatAnswer

GREY, PLAIN = "\033[0;37m", "\033[0m"
"""Escape codes around reasoning in a stream, as in kani's parsers."""


@dataclass(frozen=True)
class Outcome:
    """Facts about a complete answer."""

    finish_reason: str
    metrics: Metrics
    logprobs: list[TokenLogprob] | None

    def statistics(self) -> dict[str, Any]:
        """Returns the value of `ChatMessage.extra["pace"]`: plain values, which kani saves with the chat."""
        metrics = self.metrics
        passes = metrics.num_generated_tokens - metrics.num_accepted_tokens - metrics.num_forced_tokens
        made: dict[str, Any] = {
            "finish_reason": self.finish_reason,
            "prompt_tokens": metrics.num_prompt_tokens,
            "cached_prompt_tokens": metrics.num_reused_tokens,
            "completion_tokens": metrics.num_generated_tokens,
            "forward_passes": passes,
            "waiting_ms": round(1e3 * metrics.seconds_waiting, 3),
            "ttft_ms": round(1e3 * metrics.seconds_to_first_token, 3),
            "tok_per_s": round(metrics.decode_tokens_per_second, 3),
        }
        if self.logprobs is not None:
            made["logprobs"] = [asdict(logprob) for logprob in self.logprobs]
        return made


async def stepwise(answer: ChatAnswer) -> AsyncGenerator[Event | Outcome]:
    """Yields events with each step of the engine, then the outcome. Leaving the iteration ends the generation."""
    async with contextlib.aclosing(aiter(answer)) as events:
        async for event in events:
            yield event
    output = answer.output
    yield Outcome(output.finish_reason, output.metrics, output.logprobs)


async def beam_search(
    turn: Turn, search: Callable[[threading.Event], GenerateOutput]
) -> AsyncGenerator[Event | Outcome]:
    """Runs a beam search in a thread, and yields all events at its end, then the outcome. Leaving the iteration ends
    the search: `search` ends after the current step once its event is set."""
    cancel = threading.Event()
    try:
        output = await asyncio.to_thread(search, cancel)
    finally:
        cancel.set()
    reader = TurnReader(turn)
    reader.push(output.texts[0])
    for event in reader.drain(is_ended=True)[1]:
        yield event
    yield Outcome(output.finish_reasons[0], output.metrics, output.logprobs and output.logprobs[0])


async def pieces_and_completion(
    source: AsyncGenerator[Event | Outcome], shows_thoughts: bool, markers: Collection[str]
) -> AsyncGenerator[str | Completion]:
    """Yields text as it is generated, without calls, and with reasoning if `shows_thoughts`; then the completion.

    No piece ends within one of `markers`, because parsers look for markers in one piece at a time. The completion has
    the message and the numbers of prompt and generated tokens, including the end token."""
    beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
    longest = max(map(len, beginnings), default=0)
    events: list[Event] = []
    is_thought, held = False, ""
    async with contextlib.aclosing(source):
        async for event in source:
            if isinstance(event, Outcome):
                break
            events.append(event)
            if isinstance(event, Thought) and shows_thoughts:
                yield event.text if is_thought else GREY + event.text
                is_thought = True
            elif is_thought:
                yield PLAIN
                is_thought = False
            if isinstance(event, Text):
                held += event.text
                lengths = range(min(longest, len(held)), 0, -1)
                num_certain = len(held) - next((length for length in lengths if held[-length:] in beginnings), 0)
                text, held = held[:num_certain], held[num_certain:]
                if text:
                    yield text
    if rest := held + PLAIN * is_thought:
        yield rest
    message = as_message(events, {"pace": event.statistics()})
    yield Completion(message, event.metrics.num_prompt_tokens, event.metrics.num_generated_tokens)
