"""`POST /v1/embeddings`, `/v1/rerank`, `/v1/score` and `/v1/classify`: OpenAI's, Jina's and vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from pace.llm.limits import MAX_PRIORITY
from pace.server.embeddings.inputs import INPUT_SCHEMA, read_input, read_texts
from pace.server.embeddings.jobs import CLASSIFY, EMBED, SCORE, EncodingJob
from pace.server.errors import ApiError, invalid
from pace.server.limits import Limits
from pace.server.schemas.fields import Request, check_range

Input = Annotated[Any, WithJsonSchema(INPUT_SCHEMA)]
Texts = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "string"}}]})
]
Documents = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "object",
                        "required": ["text"],
                        "properties": {"text": {"type": "string"}},
                        "additionalProperties": False,
                    },
                ]
            },
        }  # fmt: skip
    ),
]
L2_NORM = 2
"""llama.cpp's number for vectors of length 1."""


class EncodingRequest(Request):
    """Fields of all requests for vectors, scores and labels."""

    UNUSED = frozenset({"user"})

    truncate_prompt_tokens: int | None = None
    """A longer text is cut off after this number of tokens; -1 stands for the model's maximum."""
    priority: int | None = None

    def to_job(self, limits: Limits) -> EncodingJob:
        """Returns the job of the request. Raises ApiError."""
        raise NotImplementedError

    def job(self, what: str, texts: list[Any], places: list[str], **settings: Any) -> EncodingJob:
        """Returns a job with the fields of all requests. Raises ApiError."""
        check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            check_range("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1)
        settings.setdefault("max_tokens", self.truncate_prompt_tokens)
        priority = -(self.priority or 0)  # lower is earlier on the wire
        return EncodingJob(what, texts, places, priority=priority, **settings)


class EmbeddingsRequest(EncodingRequest):
    UNSUPPORTED = {
        "late_chunking": "each text has a vector of its own",
        "messages": "send texts as input; conversations are not embedded",
    }

    input: Input
    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    """Name of a prompt of the checkpoint, which is put before each text."""
    task: str | None = None
    """Jina's: name of a task that the checkpoint has an adapter for."""
    embedding_type: str | None = None
    """Jina's name of `encoding_format`."""
    normalize: bool | None = None
    normalized: bool | None = None
    """Jina's name of `normalize`."""
    truncate: bool | None = None
    """Jina's: True for `truncate_prompt_tokens` -1."""
    embd_normalize: int | None = None
    """llama.cpp's: 2 for vectors of length 1, -1 for vectors as they are."""

    def to_job(self, limits: Limits) -> EncodingJob:
        for name in ("encoding_format", "embedding_type"):
            given = getattr(self, name)
            if given not in (None, "float", "base64"):
                raise invalid(name, f"must be float or base64, got {given[:40]!r}")
        texts, places = read_input(self.input, "input", limits.inputs)
        return self.job(
            EMBED,
            texts,
            places,
            prompt=self.prompt_name,
            task=self.task,
            dimensions=self.dimensions,
            normalise=self._normalises(),
            max_tokens=-1 if self.truncate and self.truncate_prompt_tokens is None else self.truncate_prompt_tokens,
        )

    @property
    def is_base64(self) -> bool:
        return "base64" in (self.encoding_format, self.embedding_type)

    def _normalises(self) -> bool | None:
        if self.embd_normalize not in (None, -1, L2_NORM):
            raise invalid("embd_normalize", f"must be {L2_NORM}, or -1 for vectors as they are")
        of_number = None if self.embd_normalize is None else self.embd_normalize == L2_NORM
        given = {"normalize": self.normalize, "normalized": self.normalized, "embd_normalize": of_number}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            raise invalid(list(given)[-1], "means the same as normalize; give one of them")
        return next(iter(given.values()), None)


class RerankRequest(EncodingRequest):
    """Documents to rank by a query. With `texts` in place of `documents`, request and answer have the form of
    text-embeddings-inference, which llama.cpp takes on the same path."""

    UNSUPPORTED = {
        "rank_fields": "documents have one text",
        "max_chunks_per_doc": "documents are not split",
        "max_tokens_per_doc": "send truncate_prompt_tokens, the number of tokens of query and document together",
    }

    query: str
    documents: Documents = None
    texts: Documents = None
    top_n: int | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    """Another name of `return_documents`."""
    use_activation: bool | None = None
    """False for raw logits."""
    raw_scores: bool | None = None
    truncate: bool | None = None
    """True for `truncate_prompt_tokens` -1."""
    truncation_direction: str | None = None
    instruction: str | None = None
    """Task, for a reranker that takes one."""

    @property
    def is_tei(self) -> bool:
        return self.texts is not None

    def to_job(self, limits: Limits) -> EncodingJob:
        if (self.documents is None) == (self.texts is None):
            raise ApiError(400, "give a list of documents (or of texts, but not both)", param="documents")
        if self.top_n is not None and self.top_n < 1:
            raise invalid("top_n", f"must be at least 1, got {self.top_n}")
        param = "texts" if self.is_tei else "documents"
        documents, places = read_texts([] if isinstance(self.given, str) else self.given, param, limits.inputs)
        return self.job(
            SCORE,
            [(self.query, document) for document in documents],
            places,
            use_activation=_activates(self.use_activation, self.raw_scores),
            max_tokens=tei_max_tokens(self),
            instruction=self.instruction,
        )

    @property
    def given(self) -> Any:
        """The documents as the client sent them."""
        return self.texts if self.is_tei else self.documents


class ScoreRequest(EncodingRequest):
    """Pairs of texts: one with each of several others, or each with its own."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    use_activation: bool | None = None
    instruction: str | None = None

    def to_job(self, limits: Limits) -> EncodingJob:
        names = ("text_1", "text_2")
        if self.queries is not None or self.documents is not None:
            if self.text_1 is not None or self.text_2 is not None:
                raise ApiError(400, "give text_1 and text_2, or queries and documents, but not both", param="text_1")
            names = ("queries", "documents")
        (firsts, _), (seconds, places) = (self._texts(name, limits) for name in names)
        if len(firsts) not in (1, len(seconds)):
            raise invalid(names[1], f"must have {len(firsts)} texts, as {names[0]} has; it has {len(seconds)}")
        if len(firsts) == 1:
            firsts *= len(seconds)
        return self.job(
            SCORE,
            list(zip(firsts, seconds)),
            places,
            use_activation=self.use_activation is not False,
            instruction=self.instruction,
        )

    def _texts(self, name: str, limits: Limits) -> tuple[list[str], list[str]]:
        if getattr(self, name) is None:
            raise ApiError(400, f"{name} is missing: a text, or a list of texts", param=name)
        return read_texts(getattr(self, name), name, limits.inputs)


class ClassifyRequest(EncodingRequest):
    input: Input
    use_activation: bool | None = None
    """False for raw logits in place of probabilities."""

    def to_job(self, limits: Limits) -> EncodingJob:
        texts, places = read_input(self.input, "input", limits.inputs)
        return self.job(CLASSIFY, texts, places, use_activation=self.use_activation is not False)


def tei_max_tokens(request: Any) -> int | None:
    """Returns the maximum number of tokens by the fields of text-embeddings-inference, as in `EncodingJob`. Raises
    ApiError."""
    if request.truncation_direction not in (None, "right", "Right"):
        raise invalid("truncation_direction", "must be right: texts are cut off at their end")
    return -1 if request.truncate and request.truncate_prompt_tokens is None else request.truncate_prompt_tokens


def _activates(use_activation: bool | None, raw_scores: bool | None) -> bool:
    """Returns whether scores go through the activation. Raises ApiError if the two names contradict each other."""
    if use_activation is not None and raw_scores is not None and use_activation == raw_scores:
        raise invalid("raw_scores", "is the opposite of use_activation; give one of them")
    return not raw_scores if use_activation is None else use_activation
