"""Answers of `POST /v1/responses`."""

from __future__ import annotations

import time
from typing import Any

from pace.llm.chat.events import ArgumentsPiece, CallBegins, CallEnds, Event, Text, Thought
from pace.server.answers import Piece, Usage
from pace.server.errors import ApiError
from pace.server.schemas.responses import ResponsesRequest
from pace.server.wire.form import dumps, named_event
from pace.server.wire.items import CallItem, Events, Item, MessageItem, ReasoningItem
from pace.server.wire.openai import Envelope, TokenNames, logprob_entry

ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Error codes of a response; "server_error" for all other statuses."""


class ResponsesForm:
    """A response: thoughts, messages and calls as items, in order. Its events are numbered."""

    def __init__(self, request: ResponsesRequest, envelope: Envelope, tokenizer: Any) -> None:
        """`tokenizer` gives the names of tokens, if requested."""
        self._request = request
        self._envelope = envelope
        self._names = TokenNames(tokenizer, as_ids=False)
        self._num_events = 0
        self._items: list[Item] = []
        self._is_open = False
        """True if the last item is open."""
        self._logprobs: list[dict[str, Any]] = []
        """Log-probabilities that wait for text: those of a thought, say."""
        self._reason = "stop"
        self._delta_head = b""

    def begin(self, usage: Usage) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: Piece, usage: Usage) -> bytes:
        if self._request.wants_logprobs:
            num_top = self._request.top_logprobs or 0
            self._logprobs += [
                logprob_entry(token, token.text, num_top, self._names) for token in piece.tokens if not token.is_end
            ]
        if piece.finish is not None:
            self._reason = piece.finish.reason
        return b"".join(map(self._take, piece.parts))

    def end(self, usage: Usage) -> bytes:
        status = self._status()
        data = b"" if self._items else self._open(MessageItem(0))
        return data + self._close(status) + self._event(f"response.{status}", response=self._response(status, usage))

    def error(self, error: ApiError) -> bytes:
        if self._is_open:
            self._items[-1].status = "incomplete"
        code = ERROR_CODES.get(error.status, "server_error")
        response = self._response("failed", error={"code": code, "message": error.message})
        return self._event("response.failed", response=response)

    def whole(self, choices: list[Piece], usage: Usage) -> dict[str, Any]:
        self.piece(choices[0], usage)
        self.end(usage)
        return self._response(self._status(), usage)

    def _take(self, event: Event) -> bytes:
        """Returns the events of a part of the answer."""
        match event:
            case Text(text):
                return self._continued(MessageItem) + self._delta(text)
            case Thought(text):
                return self._continued(ReasoningItem) + self._events(self._items[-1].add(text))
            case CallBegins(_, id, name):
                return self._close() + self._open(CallItem(len(self._items), id, name))
            case ArgumentsPiece(_, text):
                return self._events(self._items[-1].add(text))
            case CallEnds():
                self._items[-1].is_whole = True
                return self._close()

    def _continued(self, kind: type[Item]) -> bytes:
        """Makes sure that an item of `kind` is open, and returns the events for it."""
        if self._is_open and isinstance(self._items[-1], kind):
            return b""
        return self._close() + self._open(kind(len(self._items)))

    def _open(self, item: Item) -> bytes:
        self._items.append(item)
        self._is_open = True
        head = {"type": "response.output_text.delta", **item.place}
        self._delta_head = b"event: response.output_text.delta\ndata: " + dumps(head)[:-1]  # once for all deltas
        return self._events(item.begin())

    def _close(self, status: str = "completed") -> bytes:
        """Ends the open item, if any."""
        if not self._is_open:
            return b""
        last = self._items[-1]
        rest = self._delta("") if self._logprobs and isinstance(last, MessageItem) else b""
        self._is_open = False
        return rest + self._events(last.end(status))

    def _delta(self, text: str) -> bytes:
        """Returns the event for the text, with the waiting log-probabilities."""
        logprobs, self._logprobs = self._logprobs, []
        self._items[-1].take(text, logprobs)
        number = b"%d" % self._next_number()
        tail = dumps(logprobs) if logprobs else b"[]"
        return b'%b,"sequence_number":%b,"delta":%b,"logprobs":%b}\n\n' % (self._delta_head, number, dumps(text), tail)

    def _events(self, events: Events) -> bytes:
        return b"".join(self._event(name, **members) for name, members in events)

    def _event(self, name: str, **members: Any) -> bytes:
        return named_event(name, {"type": name, "sequence_number": self._next_number(), **members})

    def _next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _status(self) -> str:
        return "completed" if self._reason in ("stop", "tool_calls") else "incomplete"

    def _response(self, status: str, usage: Usage | None = None, error: dict[str, Any] | None = None) -> dict[str, Any]:
        request = self._request
        return {
            "id": self._envelope.id,
            "object": "response",
            "created_at": self._envelope.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._envelope.model,
            "output": [item.object() for item in self._items],
            **({} if usage is None else {"usage": _usage_object(usage)}),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_logprobs": request.top_logprobs or 0,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tools": [_tool(tool) for tool in request.tools or ()],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "truncation": "disabled",
            "service_tier": "default",
            "previous_response_id": None,
            "background": False,
            "store": False,
        }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool unchanged; for a function, adds the required members of OpenAI's object."""
    if tool.get("type", "function") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool, "type": "function"}


def _usage_object(usage: Usage) -> dict[str, Any]:
    """Returns the usage. Every prompt is cached if there is room, so no tokens are reported as written."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
