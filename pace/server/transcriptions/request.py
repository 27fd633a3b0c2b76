"""`POST /v1/audio/transcriptions`, whose body is a form."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pace.llm.configs import SamplingConfig
from pace.llm.processors.prompts import MediaPart
from pace.llm.processors.transcription import language_name, transcription_prompt
from pace.server.errors import ApiError, invalid, unsupported
from pace.server.jobs import GenerationJob, TextPrompts
from pace.server.limits import Limits
from pace.server.schemas.fields import Request
from pace.server.schemas.sampling import Settings

FORMATS = ("json", "text")
WITH_TIMES = ("srt", "vtt", "verbose_json", "diarized_json")
_SPEAKERS = "speakers are not distinguished"


class TranscriptionRequest(Request):
    """OpenAI's fields. The values of a form are texts: numbers and booleans are read from them."""

    UNSUPPORTED = {
        "timestamp_granularities": "the model gives no times of words and segments",
        "include": "log-probabilities of transcriptions are not supported",
        "chunking_strategy": "a clip is always transcribed as one block",
        "known_speaker_names": _SPEAKERS,
        "known_speaker_references": _SPEAKERS,
        "languages": "send one language",
        "keywords": "send words that are likely to occur as prompt",
    }

    file: bytes
    language: str | None = None
    """Name or code of the language; without one the model finds it."""
    prompt: str = ""
    """Text with words that are likely to occur."""
    response_format: str = "json"
    temperature: Annotated[float, Field(strict=False)] = 0.0
    stream: Annotated[bool, Field(strict=False)] = False

    def to_job(self, limits: Limits, defaults: SamplingConfig) -> GenerationJob:
        """Returns the job of the request. Raises ApiError for unsupported requests."""
        if self.response_format in WITH_TIMES:
            raise unsupported("response_format", f"{self.response_format} needs times, which the model does not give")
        if self.response_format not in FORMATS:
            raise invalid("response_format", f"must be {' or '.join(FORMATS)}, got {self.response_format[:40]!r}")
        if len(self.file) > limits.media_bytes:
            raise invalid("file", f"has {len(self.file)} bytes; the maximum is {limits.media_bytes}")
        settings = Settings(limits, defaults, is_chat=False)
        settings.draws(self)
        text, clip = transcription_prompt(self.spoken, self.prompt), MediaPart("audio", self.file, where="file")
        prompts = TextPrompts([text], add_special_tokens=False, media=(clip,))
        return GenerationJob(prompts, settings.config, None, stream=self.stream)

    @property
    def spoken(self) -> str | None:
        """The model's name of the language. Raises ApiError."""
        try:
            return language_name(self.language)
        except ValueError as error:
            raise ApiError(400, str(error), param="language") from None
