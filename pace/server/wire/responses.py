"""Answers of `POST /v1/responses`."""

from __future__ import annotations

import time
import uuid
from typing import Any

from pace.llm.decoding.token_bytes import TokenBytes
from pace.llm.decoding.token_texts import TokenPiece
from pace.server.answers import Piece, Usage
from pace.server.errors import ApiError
from pace.server.schemas.responses import ResponsesRequest
from pace.server.wire.form import dumps, named_event
from pace.server.wire.openai import Envelope, finite

ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Those that the error of a response may have; "server_error" for all others."""

_PLACE = {"output_index": 0, "content_index": 0}


class ResponsesForm:
    """A response with one message, which has one part of text. Its events are numbered."""

    def __init__(self, request: ResponsesRequest, envelope: Envelope, tokenizer: Any) -> None:
        """`tokenizer` names tokens, where they are asked for."""
        self._request = request
        self._envelope = envelope
        self._bytes = TokenBytes.of(tokenizer)
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._num_events = 0
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._reason = "stop"
        head = {"type": "response.output_text.delta", "item_id": self._item_id, **_PLACE}
        self._delta_head = b"event: response.output_text.delta\ndata: " + dumps(head)[:-1]  # made once for all deltas

    def begin(self, usage: Usage) -> bytes:
        response = self._response("in_progress", [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            + self._event("response.content_part.added", item_id=self._item_id, **_PLACE, part=_part("", []))
        )

    def piece(self, piece: Piece, usage: Usage) -> bytes:
        logprobs = self._take(piece)
        return self._delta(piece.text, logprobs) if piece.text or logprobs else b""

    def end(self, usage: Usage) -> bytes:
        part, item, status = self._part(), self._message(), self._status()
        done = {"text": part["text"], "logprobs": self._logprobs}
        return (
            self._event("response.output_text.done", item_id=self._item_id, **_PLACE, **done)
            + self._event("response.content_part.done", item_id=self._item_id, **_PLACE, part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{status}", response=self._response(status, [item], usage))
        )

    def error(self, error: ApiError) -> bytes:
        self._reason = "error"
        code = ERROR_CODES.get(error.status, "server_error")
        response = self._response("failed", [self._message()], error={"code": code, "message": error.message})
        return self._event("response.failed", response=response)

    def whole(self, choices: list[Piece], usage: Usage) -> dict[str, Any]:
        self._take(choices[0])
        return self._response(self._status(), [self._message()], usage)

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        """Keeps what a piece brings, for the objects at the end; returns its log-probabilities."""
        self._texts.append(piece.text)
        logprobs = []
        if self._request.wants_logprobs:
            logprobs = [self._logprob(token) for token in piece.tokens if not token.is_end]
            self._logprobs += logprobs
        if piece.finish is not None:
            self._reason = piece.finish.reason
        return logprobs

    def _logprob(self, piece: TokenPiece) -> dict[str, Any]:
        most = self._request.top_logprobs or 0
        return {
            "token": piece.text,
            "bytes": list(piece.data),
            "logprob": finite(piece.logprob.logprob),
            "top_logprobs": [
                {
                    "token": self._bytes.text(token),
                    "bytes": list(self._bytes[token]),
                    "logprob": finite(value),
                }
                for token, value in piece.logprob.top[:most]
                if token >= 0
            ],
        }

    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        number = b"%d" % self._next_number()
        tail = dumps(logprobs) if logprobs else b"[]"
        return b'%b,"sequence_number":%b,"delta":%b,"logprobs":%b}\n\n' % (self._delta_head, number, dumps(text), tail)

    def _event(self, name: str, **members: Any) -> bytes:
        return named_event(name, {"type": name, "sequence_number": self._next_number(), **members})

    def _next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _status(self) -> str:
        return "completed" if self._reason == "stop" else "incomplete"

    def _part(self) -> dict[str, Any]:
        return _part("".join(self._texts), self._logprobs)

    def _message(self) -> dict[str, Any]:
        return self._item(self._status(), [self._part()])

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Usage | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        request = self._request
        return {
            "id": self._envelope.id,
            "object": "response",
            "created_at": self._envelope.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._envelope.model,
            "output": output,
            **({} if usage is None else {"usage": _usage_object(usage)}),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_logprobs": request.top_logprobs or 0,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tools": [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "truncation": "disabled",
            "service_tier": "default",
            "previous_response_id": None,
            "background": False,
            "store": False,
        }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage_object(usage: Usage) -> dict[str, Any]:
    """Every prompt is kept for the next one as far as there is room: none of it is said to be written."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
