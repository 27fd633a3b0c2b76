"""Answers of `POST /v1/audio/transcriptions`."""

from __future__ import annotations

from typing import Any

from pace.llm.processors.transcription import TranscriptReader
from pace.server.answers import Piece, Usage
from pace.server.errors import ApiError
from pace.server.transcriptions.request import TranscriptionRequest
from pace.server.wire.form import data_event
from pace.server.wire.openai import Envelope


class TranscriptionForm:
    """The words of a clip. Its events have no names, and the last one has the whole text."""

    def __init__(self, request: TranscriptionRequest, envelope: Envelope, tokenizer: Any) -> None:
        self._reader = TranscriptReader(request.spoken)
        self._texts: list[str] = []

    def begin(self, usage: Usage) -> bytes:
        return b""

    def piece(self, piece: Piece, usage: Usage) -> bytes:
        text = self._reader.read(piece.text, is_last=piece.finish is not None)
        if not text:
            return b""
        self._texts.append(text)
        return data_event({"type": "transcript.text.delta", "delta": text})

    def end(self, usage: Usage) -> bytes:
        return data_event({"type": "transcript.text.done", **self._transcript(usage)})

    def error(self, error: ApiError) -> bytes:
        return data_event(error.openai())

    def whole(self, choices: list[Piece], usage: Usage) -> dict[str, Any]:
        self.piece(choices[0], usage)
        return self._transcript(usage)

    def _transcript(self, usage: Usage) -> dict[str, Any]:
        text_tokens = usage.prompt_tokens - usage.audio_tokens
        return {
            "text": "".join(self._texts),
            "usage": {
                "type": "tokens",
                "input_tokens": usage.prompt_tokens,
                "input_token_details": {"text_tokens": text_tokens, "audio_tokens": usage.audio_tokens},
                "output_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
            },
        }
