"""An `ApiError` as bytes, in the form that clients of a path read: for those who answer without the application."""

from __future__ import annotations

import json

from pace.server.errors import ApiError

Headers = list[tuple[bytes, bytes]]


def is_anthropic(path: str) -> bool:
    return path.endswith(("/messages", "/messages/count_tokens"))


def answer(error: ApiError, path: str) -> tuple[Headers, bytes]:
    """Headers and body of the error's answer."""
    body = json.dumps(error.anthropic() if is_anthropic(path) else error.openai()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    return headers + [(name.lower().encode(), value.encode()) for name, value in error.headers.items()], body
