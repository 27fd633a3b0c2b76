"""Answers of `POST /v1/messages`."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from pace.llm.chat.events import ArgumentsPiece, CallBegins, CallEnds, Event, Text, Thought
from pace.server.answers import Finish, Piece, Usage
from pace.server.errors import ApiError
from pace.server.schemas.messages import MessagesRequest
from pace.server.wire.form import dumps, named_event
from pace.server.wire.openai import Envelope

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of a block's deltas, and the name of their text."""


class Block:
    """One block of a message, while it is generated."""

    def __init__(self, index: int, kind: str, **members: Any) -> None:
        self.kind = kind
        self.is_whole = kind != "tool_use"
        """True if it is part of the final message: a call that was cut off has no input."""
        self._index = index
        self._members = members
        self._texts: list[str] = []
        delta, self._name = _DELTAS[kind]
        head = dumps({"type": "content_block_delta", "index": index, "delta": {"type": delta, self._name: ""}})
        self._head = b"event: content_block_delta\ndata: " + head[: -len('""}}')]  # once for all deltas

    def begin(self) -> bytes:
        block = {"type": self.kind, **self._members}
        return _event("content_block_start", index=self._index, content_block=block)

    def add(self, text: str) -> bytes:
        self._texts.append(text)
        return self._head + dumps(text) + b"}}\n\n"

    def end(self) -> bytes:
        return _event("content_block_stop", index=self._index)

    def end_call(self) -> None:
        """Ends a call. Its input is whole if Python can read it: its numbers may be too long, or its lists too deep."""
        with contextlib.suppress(ValueError, RecursionError):
            self._members["input"] = json.loads("".join(self._texts))
            self.is_whole = True

    def object(self) -> dict[str, Any]:
        """Returns the whole block."""
        text = {} if self.kind == "tool_use" else {self._name: "".join(self._texts)}
        return {"type": self.kind, **self._members, **text}


class MessagesForm:
    """A message with blocks of thoughts, text and calls, in order."""

    def __init__(self, request: MessagesRequest, envelope: Envelope, tokenizer: Any) -> None:
        """Accepts the arguments of all forms; needs neither the request nor the tokenizer."""
        self._envelope = envelope
        self._finish: Finish | None = None
        self._blocks: list[Block] = []
        self._is_open = False
        """True if the last block is open."""

    def begin(self, usage: Usage) -> bytes:
        return _event("message_start", message=self._message(usage)) + _event("ping")

    def piece(self, piece: Piece, usage: Usage) -> bytes:
        if piece.finish is not None:
            self._finish = piece.finish
        return b"".join(map(self._take, piece.parts))

    def end(self, usage: Usage) -> bytes:
        return (
            (b"" if self._blocks else self._open("text", text=""))
            + self._close()
            + _event("message_delta", delta=self._stop(), usage=_usage_object(usage))
            + _event("message_stop")
        )

    def error(self, error: ApiError) -> bytes:
        return named_event("error", error.anthropic())

    def whole(self, choices: list[Piece], usage: Usage) -> dict[str, Any]:
        self.piece(choices[0], usage)
        self.end(usage)
        return self._message(usage)

    def _take(self, event: Event) -> bytes:
        """Returns the events of a part of the answer."""
        match event:
            case Text(text):
                begin = b"" if self._goes_on("text") else self._open("text", text="")
                return begin + self._blocks[-1].add(text)
            case Thought(text):
                begin = b"" if self._goes_on("thinking") else self._open("thinking", thinking="", signature="")
                return begin + self._blocks[-1].add(text)
            case CallBegins(_, id, name):
                return self._open("tool_use", id=id, name=name, input={})
            case ArgumentsPiece(_, text):
                return self._blocks[-1].add(text)
            case CallEnds():
                self._blocks[-1].end_call()
                return self._close()

    def _goes_on(self, kind: str) -> bool:
        return self._is_open and self._blocks[-1].kind == kind

    def _open(self, kind: str, **members: Any) -> bytes:
        """Begins a block, after ending the last one."""
        closed = self._close()
        self._blocks.append(Block(len(self._blocks), kind, **members))
        self._is_open = True
        return closed + self._blocks[-1].begin()

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return self._blocks[-1].end()

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._envelope.id,
            "type": "message",
            "role": "assistant",
            "model": self._envelope.model,
            "content": [block.object() for block in self._blocks if block.is_whole],
            **self._stop(),
            "usage": _usage_object(usage),
        }

    def _stop(self) -> dict[str, Any]:
        """Returns the reason for the end; nulls before it."""
        finish, sequence = self._finish, None
        if finish is None:
            reason = None
        elif finish.reason == "length":
            reason = "max_tokens"
        elif any(block.kind == "tool_use" and block.is_whole for block in self._blocks):
            reason = "tool_use"
        elif isinstance(finish.stop, str):
            reason, sequence = "stop_sequence", finish.stop
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _event(name: str, **members: Any) -> bytes:
    return named_event(name, {"type": name, **members})


def _usage_object(usage: Usage) -> dict[str, Any]:
    """Returns Anthropic's usage. Input tokens are those not found in the cache: the prompt is the sum of all three
    counts."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
