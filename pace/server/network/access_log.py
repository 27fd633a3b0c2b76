"""The access log: one line on stderr for each request, including refused ones. It contains no text of prompts or
answers, and no query of a URL."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

LONGEST = 200
"""Maximum characters of a path or a name in a line."""
GONE = 499
"""Status of a request whose client left before it was answered, as in nginx."""


class Answered(Protocol):
    """Answer of the engine, such as `Answer`."""

    @property
    def usage(self) -> Any: ...

    @property
    def first_token(self) -> float | None: ...


@dataclass
class Access:
    """Data of one request. The gate, the routes and the connection fill it in."""

    request_id: str
    method: str | None = None
    path: str | None = None
    key: str | None = None
    """The name of the request's key, which does not reveal the key."""
    status: int | None = None
    model: str | None = None
    """Name given by the client."""
    answer: Answered | None = None
    begin: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, scope: Any) -> Access:
        """Returns the entry of an ASGI scope. Without a gate in front, returns one that is never written."""
        return (scope.get("pace") or {}).get("access") or cls("")

    def line(self) -> str:
        """Returns `name=value` for every field, with `-` for missing values. Values with blanks and other special
        characters are quoted as in JSON."""
        usage, first = (None, None) if self.answer is None else (self.answer.usage, self.answer.first_token)
        fields = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "request_id": self.request_id,
            "key": self.key,
            "method": self.method,
            "path": self.path,
            "status": self.status or GONE,
            "model": self.model,
            "prompt_tokens": usage and usage.prompt_tokens,
            "completion_tokens": usage and usage.completion_tokens,
            "first_token_s": None if first is None else f"{first - self.begin:.4f}",
            "total_s": f"{time.perf_counter() - self.begin:.4f}",
        }
        return " ".join(f"{name}={_shown(value)}" for name, value in fields.items())

    def write(self) -> None:
        print(self.line(), file=sys.stderr, flush=True)


def _shown(value: Any) -> str:
    text = "-" if value is None else str(value)[:LONGEST]
    return text if re.fullmatch(r"[A-Za-z0-9._:/@+~%-]+", text) else json.dumps(text)
