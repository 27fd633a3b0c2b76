"""`POST /embed` and `POST /predict` of text-embeddings-inference: bare lists."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from pace.server.embeddings.inputs import INPUT_SCHEMA, read_input
from pace.server.embeddings.jobs import CLASSIFY, EMBED, EncodingJob
from pace.server.embeddings.requests import EncodingRequest, tei_max_tokens
from pace.server.errors import invalid
from pace.server.limits import Limits
from pace.server.schemas.fields import check_count, type_name

_TEXT = {"type": "string"}
_PAIR = {"type": "array", "minItems": 1, "maxItems": 2, "items": _TEXT}
_PREDICT = {"anyOf": [_TEXT, _PAIR, {"type": "array", "minItems": 1, "items": _PAIR}]}


class TeiRequest(EncodingRequest):
    """Fields of both."""

    truncate: bool | None = None
    """True to cut off texts that are too long."""
    truncation_direction: str | None = None


class EmbedRequest(TeiRequest):
    inputs: Annotated[Any, WithJsonSchema(INPUT_SCHEMA)]
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None

    def to_job(self, limits: Limits) -> EncodingJob:
        texts, places = read_input(self.inputs, "inputs", limits.inputs)
        return self.job(
            EMBED,
            texts,
            places,
            prompt=self.prompt_name,
            dimensions=self.dimensions,
            normalise=self.normalize,
            max_tokens=tei_max_tokens(self),
        )


class PredictRequest(TeiRequest):
    """One text (a string, or a list of one), a pair (a list of two strings), or a list of such lists."""

    inputs: Annotated[Any, WithJsonSchema(_PREDICT)]
    raw_scores: bool | None = None

    @property
    def is_batch(self) -> bool:
        return isinstance(self.inputs, list) and any(isinstance(entry, list) for entry in self.inputs)

    def to_job(self, limits: Limits) -> EncodingJob:
        if self.is_batch:
            check_count("inputs", self.inputs, limits.inputs)
            places = [f"inputs[{index}]" for index in range(len(self.inputs))]
            texts = [_text_or_pair(entry, place) for entry, place in zip(self.inputs, places)]
        else:
            texts, places = [_text_or_pair(self.inputs, "inputs")], ["inputs"]
        return self.job(CLASSIFY, texts, places, use_activation=not self.raw_scores, max_tokens=tei_max_tokens(self))


def _text_or_pair(value: Any, place: str) -> str | tuple[str, str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid(place, f"must be a string, or a list of one or two strings; got {type_name(value)}")
    if len(texts) not in (1, 2):
        raise invalid(place, f"must have one text or two, got {len(texts)}")
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])
