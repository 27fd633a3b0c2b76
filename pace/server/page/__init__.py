"""The chat page: one file, with headers that allow only its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page connects only to its own origin. `{script}` and `{style}` are hashes of the file's contents: nothing
inserted later runs, and text is never parsed as HTML."""


@dataclass(frozen=True)
class Page:
    """The answer of `GET /`."""

    body: bytes
    etag: str
    headers: dict[str, str]
    """All headers, including the ETag; also those of a 304."""

    def is_known(self, if_none_match: str | None) -> bool:
        """True if a browser that sends this `If-None-Match` has the page already, so that a 304 suffices."""
        known = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
        return self.etag in known or known == ["*"]


@cache
def page() -> Page:
    """Returns the page from the file next to this one, read once."""
    text = Path(__file__).with_name("index.html").read_text(encoding="utf-8")
    policy = CONTENT_SECURITY_POLICY.format(script=_hash_of("script", text), style=_hash_of("style", text))
    body = text.encode()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "ETag": etag,
    }
    return Page(body, etag, headers)


def _hash_of(tag: str, text: str) -> str:
    """Returns the source expression of the only inline element with this name."""
    (content,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
