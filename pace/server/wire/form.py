"""What every form of answer can do. One object serves one request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from pace.server.errors import ApiError

if TYPE_CHECKING:
    from pace.server.answers import Piece, Usage


class WireForm(Protocol):
    """Turns the pieces of an answer into events of a stream, or into one object.

    In a stream `begin` comes first, then `piece` in the order in which they come, choices interleaved, each choice's
    last one with its `finish`; then `end`. After an error, `error` instead of `end`. Each returns whole events as
    bytes, maybe b"".
    """

    def begin(self, usage: Usage) -> bytes:
        """Before anything is generated; of `usage`, the prompt is known."""
        ...

    def piece(self, piece: Piece, usage: Usage) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...

    def whole(self, choices: list[Piece], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed: a piece for each choice, with all of its text."""
        ...


LINE_ENDS = ("\x85", "\u2028", "\u2029")
"""Ends of lines for many a reader of events (`str.splitlines`), though not for JSON: to be escaped."""


def dumps(value: Any) -> bytes:
    """JSON as it goes over the wire: UTF-8 in one line, without spaces. Half surrogate pairs, which no UTF-8 has, are
    escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for end in LINE_ENDS:
        if end in text:
            text = text.replace(end, f"\\u{ord(end):04x}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def data_event(value: Any) -> bytes:
    """A server-sent event without a name, as OpenAI's chat and completions have them."""
    return b"data: " + dumps(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """A server-sent event with a name, as Anthropic's messages and OpenAI's responses have them."""
    return b"event: " + name.encode() + b"\ndata: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
