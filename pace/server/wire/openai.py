"""Parts shared by OpenAI's chat and completions."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from pace.llm.text.token_bytes import TokenBytes
from pace.server.answers import Usage
from pace.server.schemas.generation import GenerationRequest

LEAST_LOGPROB = -9999.0
"""Substitute for -inf, which JSON cannot represent."""


@dataclass(frozen=True)
class Envelope:
    """Members common to every chunk of one answer."""

    model: str
    fingerprint: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str) -> Envelope:
        """Returns an envelope with a new id, which begins with `prefix`."""
        return cls(model, fingerprint, f"{prefix}{uuid.uuid4().hex}")

    def members(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class TokenNames:
    """Names of tokens in the form that the client requested: their text, or `token_id:N`."""

    def __init__(self, tokenizer: Any, as_ids: bool) -> None:
        self.bytes = TokenBytes.of(tokenizer)
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self.bytes.text(token)


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def wants_usage(request: GenerationRequest) -> tuple[bool, bool]:
    """Returns two flags: True if a stream ends with its usage, and True if every chunk has it."""
    options = request.stream_options
    at_end = options is not None and bool(options.include_usage)
    return at_end, at_end and bool(options.continuous_usage_stats)


def prompt_logprobs(prompt: list[Any], names: TokenNames) -> list[dict[str, Any] | None]:
    """Returns vLLM's form: for each prompt token an object with its log-probability and those of the likeliest tokens,
    by id."""
    entries: list[dict[str, Any] | None] = []
    for piece in prompt:
        if piece.logprob is None:
            entries.append(None)
            continue
        ranked = list(piece.logprob.top)
        entry = {
            str(token): {"logprob": finite(value), "rank": rank, "decoded_token": names.name(token)}
            for rank, (token, value) in enumerate(ranked, 1)
            if token >= 0
        }
        value, rank = finite(piece.logprob.logprob), piece.logprob.rank
        own = {"logprob": value, "rank": rank, "decoded_token": names.name(piece.token)}
        entries.append({str(piece.token): own} | entry)
    return entries
