"""Interface of all forms of answers. One object serves one request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from pace.server.errors import ApiError

if TYPE_CHECKING:
    from pace.server.answers import Piece, Usage


class WireForm(Protocol):
    """Turns the pieces of an answer into events of a stream, or into one object.

    In a stream `begin` comes first. Then comes `piece` for each piece in order, with choices interleaved; each choice's
    last piece has its `finish`. `end` comes last, or `error` instead after an error. Each returns whole events as
    bytes, or b"" for none.
    """

    def begin(self, usage: Usage) -> bytes:
        """Called before anything is generated; `usage` includes the prompt."""
        ...

    def piece(self, piece: Piece, usage: Usage) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...

    def whole(self, choices: list[Piece], usage: Usage) -> dict[str, Any]:
        """Returns the answer that is not streamed: `choices` has one piece for each choice, with all of its text."""
        ...


LINE_ENDS = ("\x85", "\u2028", "\u2029")
"""Line ends in many readers of events (`str.splitlines`), but not in JSON: they must be escaped."""


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""Made once: every piece of text is encoded."""


def dumps(value: Any) -> bytes:
    """Returns JSON as sent to clients: UTF-8 in one line, without spaces. Half surrogate pairs, which are invalid in
    UTF-8, are escaped."""
    text = _encode(value)
    for end in LINE_ENDS:
        if end in text:
            text = text.replace(end, f"\\u{ord(end):04x}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def data_event(value: Any) -> bytes:
    """Returns a server-sent event without a name, as in OpenAI's chat and completions."""
    return b"data: " + dumps(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """Returns a server-sent event with a name, as in Anthropic's messages and OpenAI's responses."""
    return b"event: " + name.encode() + b"\ndata: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
