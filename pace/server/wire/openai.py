"""Parts shared by OpenAI's APIs."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from pace.llm.text.token_bytes import TokenBytes
from pace.llm.text.token_texts import TokenPiece
from pace.server.answers import Usage
from pace.server.errors import ApiError
from pace.server.wire.form import DONE, data_event, dumps

MIN_LOGPROB = -9999.0
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
    return max(logprob, MIN_LOGPROB)


class OpenAIForm:
    """Base of chat and completions: a stream of chunks, each with one choice."""

    kind = ""
    """The `object` of an answer."""
    chunk_kind = ""
    """The `object` of a chunk."""

    def __init__(self, request: Any, envelope: Envelope, tokenizer: Any) -> None:
        self._request = request
        self._envelope = envelope
        self._names = TokenNames(tokenizer, bool(request.return_tokens_as_token_ids))
        options = request.stream_options
        self._wants_usage = options is not None and bool(options.include_usage)
        self._wants_usage_always = self._wants_usage and bool(options.continuous_usage_stats)
        members = dumps(envelope.members(self.chunk_kind))
        self._head = b"data: " + members[:-1] + b',"choices":['  # made once: a stream is many chunks

    def begin(self, usage: Usage) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        if not self._wants_usage:
            return DONE
        members = self._envelope.members(self.chunk_kind)
        return data_event({**members, "choices": [], "usage": usage_object(usage)}) + DONE

    def error(self, error: ApiError) -> bytes:
        return data_event(error.openai()) + DONE

    def _whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {**self._envelope.members(self.kind), "choices": choices, "usage": usage_object(usage)}

    def _chunk(self, choice: dict[str, Any], usage: Usage, members: dict[str, Any] | None = None) -> bytes:
        """Returns a chunk of one choice, with `members` next to the choices."""
        tail = b',"usage":' + dumps(usage_object(usage)) if self._wants_usage_always else b""
        if members:
            tail += b"," + dumps(members)[1:-1]
        return self._head + dumps(choice) + b"]" + tail + b"}\n\n"

    def _token_name(self, piece: TokenPiece) -> str:
        return self._names.name(piece.token) if self._request.return_tokens_as_token_ids else piece.text


def logprob_entry(piece: TokenPiece, name: str, num_top: int, names: TokenNames) -> dict[str, Any]:
    """Returns the log-probability of a token, which is called `name`, and those of the `num_top` likeliest."""

    def entry(name: str, data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": name, "bytes": list(data), "logprob": finite(logprob)}

    top = [
        entry(names.name(token), names.bytes[token], value)
        for token, value in piece.logprob.top[:num_top]
        if token >= 0
    ]
    return {**entry(name, piece.data, piece.logprob.logprob), "top_logprobs": top}


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
