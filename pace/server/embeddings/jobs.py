"""`EncodingJob`: a request for vectors, scores or labels in a form that is independent of its API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pace.server.answers import Usage

EMBED, SCORE, CLASSIFY = "embed", "score", "classify"
"""What a job asks for."""


@dataclass(frozen=True)
class EncodingJob:
    """Texts, and what to compute of them. Fields are checked; a worker reads and tokenises the texts."""

    what: str
    """EMBED, SCORE or CLASSIFY."""
    texts: list[Any]
    """Texts, token ids, or pairs of texts (a tuple of two), in the client's form."""
    places: list[str]
    """The client's name of each text, for errors."""
    prompt: str | None = None
    """Name of the prompt before each text; None for the model's default."""
    task: str | None = None
    """Name of the task whose adapter the model has; None for the prompt's, or the model's default."""
    dimensions: int | None = None
    """Number of dimensions of a vector; None for all."""
    normalise: bool | None = None
    """True for vectors of length 1; None for the model's own choice."""
    use_activation: bool = True
    """False for raw logits in place of scores and probabilities."""
    max_tokens: int | None = None
    """Maximum number of tokens, where a text is cut off; -1 for the model's maximum. None refuses longer texts."""
    instruction: str | None = None
    """Task of a reranker that takes one, such as Qwen3-Reranker."""
    priority: int = 0
    """Higher is earlier."""


@dataclass(frozen=True)
class Encoded:
    """The answer to a job."""

    values: Tensor
    """float32 `[N, P]`: vectors, scores (P = 1), logits or probabilities, one row for each text."""
    num_tokens: list[int]
    """Tokens of each text, special tokens included."""
    first_token: float | None = None
    """No token is generated. The access log asks for this."""

    @property
    def usage(self) -> Usage:
        return Usage(sum(self.num_tokens), 0, 0)
