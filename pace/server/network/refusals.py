"""`ApiError` as bytes, in the form for clients of a path, for answers without the application."""

from __future__ import annotations

import re
import secrets

from pace.server.errors import ApiError
from pace.server.wire.form import dumps

Headers = list[tuple[bytes, bytes]]


def is_anthropic(path: str) -> bool:
    return path.endswith(("/messages", "/messages/count_tokens"))


def request_id(headers: Headers) -> str:
    """Returns the client's own `x-request-id` if it is safe in logs and headers; else a new one."""
    given = [value for name, value in headers if name == b"x-request-id"]
    if len(given) == 1 and re.fullmatch(rb"[A-Za-z0-9._-]{1,128}", given[0]):
        return given[0].decode()
    return f"req_{secrets.token_hex(12)}"


def id_headers(request_id: str, path: str) -> Headers:
    """Returns the headers with the request's id; on Anthropic's paths also under Anthropic's name."""
    names = (b"x-request-id", b"request-id") if is_anthropic(path) else (b"x-request-id",)
    return [(name, request_id.encode()) for name in names]


def answer(error: ApiError, path: str) -> tuple[Headers, bytes]:
    """Returns headers and body of the error's answer."""
    body = dumps(error.anthropic() if is_anthropic(path) else error.openai())
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    return headers + [(name.lower().encode(), value.encode()) for name, value in error.headers.items()], body
