"""Records what one request of a load test received, and when."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from pace.bench.serving.events import EventParser
from pace.bench.serving.http import BadResponse

_read_json = json.JSONDecoder().decode
"""Like `json.loads`, but takes two thirds of its time for an event."""

TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
"""Fields of a chat delta that a user waits for; the role is not one."""


@dataclass(frozen=True)
class Failure:
    """Reason why a request has no answer."""

    kind: str
    """Category that is counted: "HTTP 429", "refused", "dropped", "timeout", "error event", "malformed", "no usage",
    "network"."""
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Converts an exception to a Failure; raises it again if it is not a failure of the server or the network."""
        if isinstance(error, RequestFailed):
            return error.failure
        for kinds, kind in _KINDS:
            if isinstance(error, kinds):
                return cls(kind, str(error) or type(error).__name__)
        raise error


_KINDS: list[tuple[type[Exception], str]] = [
    (TimeoutError, "timeout"),
    (ConnectionRefusedError, "refused"),
    (ConnectionError, "dropped"),
    (BadResponse, "malformed"),
    (OSError, "network"),
]


class RequestFailed(Exception):
    """Raised if the server refuses a request or its answer is malformed."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)


class Record:
    """Times of one request in seconds of `time.perf_counter`, and the server's counts of its tokens."""

    def __init__(self, due: float) -> None:
        """`due`: when the request was to be sent. Waiting from then on counts as part of its time."""
        self.due = due
        self.sent = due
        self.arrivals: list[float] = []
        """Time of arrival of each piece of text; pieces that arrive together count once."""
        self.last = due
        """Time of the last event with a choice: text, or a finish reason."""
        self.ended = due
        self.input_tokens = 0
        self.output_tokens = 0
        self.failure: Failure | None = None
        self._events = EventParser()
        self._error_body = b""
        self._has_usage = False

    # -- while it is in flight -----------------------------------------------------------------------------------------

    def receive(self, status: int, data: bytes) -> None:
        """Processes a part of the answer's body. Raises RequestFailed for an error among the events."""
        now = time.perf_counter()
        if status != 200:
            self._error_body += data
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                continue
            try:
                self._take(_read_json(event.decode()), now)
            except (AttributeError, KeyError, TypeError, ValueError):
                raise RequestFailed("malformed", f"no event of OpenAI's form: {event[:80]!r}") from None

    def finish(self, status: int) -> None:
        """Records that the answer is complete. Raises RequestFailed if it is not a valid answer."""
        self.ended = time.perf_counter()
        if status != 200:
            raise RequestFailed(f"HTTP {status}", error_message(self._error_body) or f"the server answered {status}")
        if not self._has_usage:
            raise RequestFailed(
                "no usage",
                "the stream ended without a count of its tokens: it was cut off, or the server does not know "
                "stream_options.include_usage",
            )
        if self.last == self.due:
            raise RequestFailed("malformed", "the stream has no choice, only a count of tokens")
        if not self.arrivals:  # an answer without text: its end counts as the first token
            self.arrivals.append(self.last)

    def fail(self, error: Exception) -> None:
        self.ended = time.perf_counter()
        self.failure = Failure.of(error)

    def _take(self, event: dict[str, Any], now: float) -> None:
        """Records an event. Its usage is cumulative: the last one counts."""
        if event.get("error"):
            raise RequestFailed("error event", _message_of(event["error"]))
        usage = event.get("usage")
        if usage:
            self._has_usage = True
            self.input_tokens, self.output_tokens = usage["prompt_tokens"], usage.get("completion_tokens", 0)
        if choices := event.get("choices"):
            self.last = now
            if any(_has_text(choice) for choice in choices):
                self.arrivals.append(now)

    # -- afterwards -------------------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        return self.failure is None

    @property
    def ttft(self) -> float:
        """Time to first token, from when the request was due."""
        return self.arrivals[0] - self.due

    @property
    def e2el(self) -> float:
        """End-to-end latency, from when the request was due to the end of the answer."""
        return self.last - self.due

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 for an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Times between pieces of text. A server may send several tokens in one piece."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:])]


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in TEXT_FIELDS)


def error_message(body: bytes) -> str:
    """Returns the message of an error response, in any form that servers use."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:200].decode("utf-8", "replace").strip()
    return _message_of(value.get("error") or value.get("detail") or value) if isinstance(value, dict) else str(value)


def _message_of(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
