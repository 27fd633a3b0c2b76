"""Answers of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from pace.llm.chat.events import ArgumentsPiece, CallBegins, Event, Text, Thought, calls_of, thought_of
from pace.server.answers import Piece, TokenPiece, Usage
from pace.server.schemas.chat import ChatRequest
from pace.server.schemas.turns import tool_call
from pace.server.wire.openai import Envelope, OpenAIForm, logprob_entry, prompt_logprobs


class ChatForm(OpenAIForm):
    """A role first, then text, then the finish reason, in separate chunks."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, envelope: Envelope, tokenizer: Any) -> None:
        super().__init__(request, envelope, tokenizer)
        self._begun: set[int] = set()

    def piece(self, piece: Piece, usage: Usage) -> bytes:
        chunks = b""
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            first = self._choice(piece.index, {"role": "assistant", "content": ""})
            chunks += self._chunk(first, usage, self._prompt_members(piece))
        deltas = list(filter(None, map(_delta, piece.events)))
        if not deltas and (piece.text or piece.tokens):
            deltas = [{"content": piece.text}]
        for number, delta in enumerate(deltas):
            choice = self._choice(piece.index, delta)
            self._add_tokens(choice, [] if number else piece.tokens)
            chunks += self._chunk(choice, usage)
        if piece.finish is not None:
            choice = self._choice(piece.index, {})
            choice["finish_reason"], choice["stop_reason"] = piece.finish.reason, piece.finish.stop
            chunks += self._chunk(choice, usage)
        return chunks

    def whole(self, choices: list[Piece], usage: Usage) -> dict[str, Any]:
        body = self._whole([self._message(choice) for choice in choices], usage)
        prompt = choices[0].prompt
        if prompt is not None and self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(prompt, self._names)
        return body | self._prompt_members(choices[0])

    def _prompt_members(self, piece: Piece) -> dict[str, Any]:
        """Returns the prompt's tokens next to the choices, as vLLM does for chat; in completions they are in a
        choice."""
        if piece.prompt is None or not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": [token.token for token in piece.prompt]}

    def _message(self, choice: Piece) -> dict[str, Any]:
        message = {
            "index": choice.index,
            "message": _message_of(choice),
            "logprobs": None,
            "finish_reason": choice.finish.reason,
            "stop_reason": choice.finish.stop,
        }
        self._add_tokens(message, choice.tokens)
        return message

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _add_tokens(self, choice: dict[str, Any], tokens: list[TokenPiece]) -> None:
        if self._request.logprobs:
            num_top = self._request.top_logprobs or 0
            shown = [
                logprob_entry(token, self._token_name(token), num_top, self._names)
                for token in tokens
                if not token.is_end
            ]
            choice["logprobs"] = {"content": shown, "refusal": None}
        if self._request.return_token_ids:
            choice["token_ids"] = [token.token for token in tokens]


def _delta(event: Event) -> dict[str, Any]:
    """Returns the delta for a part of an answer."""
    match event:
        case Text(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallBegins(index, id, name):
            return {"tool_calls": [{"index": index, **tool_call(id, name, "")}]}
        case ArgumentsPiece(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return {}


def _message_of(choice: Piece) -> dict[str, Any]:
    """Returns the message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    thought, calls = thought_of(choice.events), calls_of(choice.events)
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in calls]
    return message
