"""Chat answers: text, thoughts and tool calls of one turn, streamed or whole."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pace.llm.chat.events import Event, Text, calls_of, thought_of
from pace.llm.chat.tools import ToolCall
from pace.llm.chat.turn import Turn, TurnReader
from pace.llm.clients.requests import Request
from pace.llm.clients.streamer import StreamEvent
from pace.llm.outputs import Metrics
from pace.llm.sequence import TokenLogprob


@dataclass(frozen=True)
class ChatOutput:
    """A complete answer, or the part generated so far."""

    text: str
    """Text of the answer, without thoughts and calls."""
    thought: str
    """The model's thoughts before the answer, if its template has thoughts; else ""."""
    tool_calls: list[ToolCall]
    """Calls in order. If the answer was cut off (`finish_reason` "length"), the last one's arguments may be
    incomplete."""
    finish_reason: str
    """ "stop", "tool_calls", "length" or "cancelled"."""
    logprobs: list[TokenLogprob] | None
    """Log-probability of each generated token, if requested by `SamplingConfig.logprobs`."""
    metrics: Metrics

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class ChatAnswer:
    """A streamed answer, made by `LLMModel.chat(stream=True)`. Iterating, also by `async for`, yields each event once,
    as it occurs. Closing or dropping it ends the generation."""

    def __init__(self, start: Callable[[], Request], turn: Turn) -> None:
        """`start` posts the request, when the first event is requested."""
        self._start = start
        self._reader = TurnReader(turn)
        self._request: Request | None = None
        self._seen: list[Event] = []
        self._coming = self._events()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._coming)

    def close(self) -> None:
        """Ends the generation, if it has not ended. `output` is then the part generated so far. Closing twice is
        harmless."""
        self._coming.close()

    @property
    def output(self) -> ChatOutput:
        """Waits for the end and returns the answer. Raises the request's error."""
        for _ in self._coming:
            pass
        if self._request is None:
            raise ValueError("this answer was closed before its generation began")
        output = self._request.result()
        reason = output.finish_reasons[0]
        return ChatOutput(
            text="".join(event.text for event in self._seen if isinstance(event, Text)),
            thought=thought_of(self._seen),
            tool_calls=calls_of(self._seen),
            finish_reason="tool_calls" if reason == "stop" and calls_of(self._seen) else reason,
            logprobs=output.logprobs and output.logprobs[0],
            metrics=output.metrics,
        )

    def _events(self) -> Iterator[Event]:
        self._request = self._start()
        try:
            for event in self._request.events():
                yield from self._read(event)
        finally:
            self._request.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        if self._request is not None:
            return
        self._coming.close()
        self._request = self._start()
        try:
            async with contextlib.aclosing(self._request.aevents()) as events:
                async for event in events:
                    for part in self._read(event):
                        yield part
        finally:
            self._request.cancel()

    def _read(self, event: StreamEvent) -> list[Event]:
        """Returns the parts of the turn that an event makes certain."""
        self._reader.push(event.text)
        _, parts = self._reader.drain(is_ended=event.finish_reason is not None)
        self._seen += parts
        return parts
