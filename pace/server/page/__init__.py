"""The chat page: one file, and headers that let it run its own script and nothing else."""

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
"""Talks to its own origin alone. `{script}` and `{style}` are hashes of what the file holds: nothing that gets into the
page later runs, and text is never parsed as HTML."""


@dataclass(frozen=True)
class Page:
    """What `GET /` answers."""

    body: bytes
    etag: str
    headers: dict[str, str]
    """All of them, the ETag included; those of a 304, too."""

    def is_known(self, if_none_match: str | None) -> bool:
        """Whether a browser that sends this `If-None-Match` has the page already, so that 304 will do."""
        known = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
        return self.etag in known or known == ["*"]


@cache
def page() -> Page:
    """The page as it lies next to this file, read once."""
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
    """The source expression of the one inline element of this name."""
    (content,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
