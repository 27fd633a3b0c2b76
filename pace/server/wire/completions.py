"""Answers of `POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from pace.server.answers import Piece, TokenPiece, Usage
from pace.server.schemas.completions import CompletionsRequest
from pace.server.wire.openai import Envelope, OpenAIForm, finite, prompt_logprobs


class CompletionsForm(OpenAIForm):
    """Text, and in the last chunk the finish reason."""

    kind = chunk_kind = "text_completion"

    def __init__(self, request: CompletionsRequest, envelope: Envelope, tokenizer: Any) -> None:
        super().__init__(request, envelope, tokenizer)
        self._offsets: dict[int, int] = {}
        """Characters of each choice so far."""

    def piece(self, piece: Piece, usage: Usage) -> bytes:
        return self._chunk(self._choice(piece), usage)

    def whole(self, choices: list[Piece], usage: Usage) -> dict[str, Any]:
        return self._whole([self._choice(choice) for choice in choices], usage)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        """Returns a choice, or the new part of one."""
        tokens, text = piece.tokens, piece.text
        if piece.prompt is not None and self._request.echo:
            tokens = [*piece.prompt, *tokens]
            text = "".join(token.text for token in piece.prompt) + text
        choice = {
            "index": piece.index,
            "text": text,
            "logprobs": None if self._request.logprobs is None else self._logprobs(piece.index, tokens),
            "finish_reason": None if piece.finish is None else piece.finish.reason,
            "stop_reason": None if piece.finish is None else piece.finish.stop,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = [token.token for token in piece.tokens]
        if piece.prompt is not None and self._request.return_token_ids:
            choice["prompt_token_ids"] = [token.token for token in piece.prompt]
        if piece.prompt is not None and self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(piece.prompt, self._names)
        return choice

    def _logprobs(self, index: int, tokens: list[TokenPiece]) -> dict[str, Any]:
        names, values, tops, offsets = [], [], [], []
        for piece in tokens:
            names.append(self._token_name(piece))
            values.append(None if piece.logprob is None else finite(piece.logprob.logprob))
            tops.append(self._top(piece))
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(piece.text)
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, piece: TokenPiece) -> dict[str, float] | None:
        """Returns the likeliest tokens by name, and the chosen one. If two have one name, keeps the likelier."""
        if piece.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, value in (*piece.logprob.top[: self._request.logprobs], (piece.token, piece.logprob.logprob)):
            if token >= 0:
                name = self._names.name(token)
                top[name] = max(finite(value), top.get(name, -float("inf")))
        return top
