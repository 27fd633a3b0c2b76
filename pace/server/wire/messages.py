"""Answers of `POST /v1/messages`."""

from __future__ import annotations

from typing import Any

from pace.server.answers import Finish, Piece, Usage
from pace.server.errors import ApiError
from pace.server.schemas.messages import MessagesRequest
from pace.server.wire.form import dumps, named_event
from pace.server.wire.openai import Envelope

_DELTA_HEAD = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)


class MessagesForm:
    """A message with one block of text."""

    def __init__(self, request: MessagesRequest, envelope: Envelope, tokenizer: Any) -> None:
        """As all forms are made; this one asks neither the request nor the tokenizer."""
        self._envelope = envelope
        self._finish: Finish | None = None

    def begin(self, usage: Usage) -> bytes:
        return (
            _event("message_start", message=self._message([], None, usage))
            + _event("content_block_start", index=0, content_block=_block(""))
            + _event("ping")
        )

    def piece(self, piece: Piece, usage: Usage) -> bytes:
        if piece.finish is not None:
            self._finish = piece.finish
        return _DELTA_HEAD + dumps(piece.text) + b"}}\n\n" if piece.text else b""

    def end(self, usage: Usage) -> bytes:
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=_stop(self._finish), usage=_usage_object(usage))
            + _event("message_stop")
        )

    def error(self, error: ApiError) -> bytes:
        return named_event("error", error.anthropic())

    def whole(self, choices: list[Piece], usage: Usage) -> dict[str, Any]:
        return self._message([_block(choices[0].text)], choices[0].finish, usage)

    def _message(self, content: list[dict[str, Any]], finish: Finish | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._envelope.id,
            "type": "message",
            "role": "assistant",
            "model": self._envelope.model,
            "content": content,
            **_stop(finish),
            "usage": _usage_object(usage),
        }


def _event(name: str, **members: Any) -> bytes:
    return named_event(name, {"type": name, **members})


def _block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _stop(finish: Finish | None) -> dict[str, Any]:
    """Why the answer ended; nulls while it goes on."""
    if finish is None:
        return {"stop_reason": None, "stop_sequence": None}
    if finish.reason != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(finish.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage_object(usage: Usage) -> dict[str, Any]:
    """Anthropic counts as input what was not found in the cache: the prompt is the sum of all three."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
