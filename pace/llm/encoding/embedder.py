"""`Embedder`: what turns tokenised texts into pooled rows or logits. An encoder's driver and a causal model's engine
implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from pace.llm.engine.driver import StepDriver

Pooling = tuple[str, ...]
"""Names in `pace.ops.pooling.POOLINGS`; several are concatenated in this order."""

LOGITS: Literal["logits"] = "logits"
"""Asks `Embedder.submit` for the logits of the classifier."""

What = Pooling | Literal["logits"]


@dataclass(frozen=True)
class TextTokens:
    """One text, or a pair of texts: its token ids, with special tokens."""

    tokens: tuple[int, ...]
    types: tuple[int, ...] | None = None
    """The type of each token: 0, or 1 in the second text of a pair. None: all are 0."""
    task: str | None = None
    """A task of the model, whose adapter its rows have. None: the rows of the model without adapters."""
    cache_salt: str | None = None
    """Texts with different salts share no cached prefixes."""

    def __len__(self) -> int:
        return len(self.tokens)


class Embedder(Protocol):
    """Computes pooled rows and logits of texts. Thread-safe. Rows of a text have the same bits alone and next to any
    others."""

    hidden_size: int
    """Floats of a row, before pooling."""
    max_length: int
    """Maximum number of tokens of a text."""
    vocab_size: int
    num_types: int
    """Number of token types that the model distinguishes. Texts only have `types` if it is above 1."""
    num_labels: int
    """Logits of its classifier; 0 without one."""
    instructions: Mapping[str, str]
    """Task of an adapter -> the text that is put before a text. Empty for most models."""

    def submit(self, texts: Sequence[TextTokens], what: What) -> Future[Tensor]:
        """Queues texts. The future gets float32 `[N, P]`, the pooled rows of each text in order, P is `hidden_size` for
        each name of a pooling. With LOGITS it gets raw logits `[N, num_labels]`.

        `cancel()` of the future works until the last of its texts is computed, also while others are. Raises ValueError
        for a text that `check_texts` refuses, for an unknown pooling, for LOGITS without a classifier, and after
        `close`."""

    def rows(self, texts: Sequence[TextTokens], pooling: Pooling) -> Tensor:
        """Returns `submit(texts, pooling).result()`. Cancels it if the wait is interrupted."""

    def logits(self, texts: Sequence[TextTokens]) -> Tensor:
        """Returns `submit(texts, LOGITS).result()`. Cancels it if the wait is interrupted."""

    @property
    def driver(self) -> StepDriver:
        """The thread that runs its steps, for servers: its turns, and whether it is well."""
        ...

    def close(self) -> None:
        """Ends its thread and frees the model. What waits fails with a ValueError. Closing twice is harmless."""


def wait_for(future: Future[Tensor]) -> Tensor:
    """Returns the result of a future; cancels it if the wait is interrupted, by Ctrl-C for example."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def check_texts(embedder: Embedder, texts: Sequence[TextTokens]) -> None:
    """Raises ValueError for a text that is empty or too long, and for ids and types that the model does not have."""
    for index, text in enumerate(texts):
        if not text.tokens:
            raise ValueError(f"text {index} has no tokens; a text needs at least one")
        if len(text.tokens) > embedder.max_length:
            raise ValueError(
                f"text {index} has {len(text.tokens)} tokens, more than the {embedder.max_length} of this model; "
                "shorten it, or pass truncate=True"
            )
        if not 0 <= min(text.tokens) <= max(text.tokens) < embedder.vocab_size:
            wrong = next(token for token in text.tokens if not 0 <= token < embedder.vocab_size)
            raise ValueError(
                f"text {index} has the token id {wrong}; ids of this model are 0 to {embedder.vocab_size - 1}"
            )
        if text.task is not None and text.task not in embedder.instructions:
            raise ValueError(f"text {index} has the task {text.task!r}, which this model has no adapter for")
        if text.types is not None:
            _check_types(embedder, text, text.types, index)


def _check_types(embedder: Embedder, text: TextTokens, types: tuple[int, ...], index: int) -> None:
    if len(types) != len(text.tokens):
        raise ValueError(f"text {index} has {len(text.tokens)} tokens, and {len(types)} types")
    most = max(1, embedder.num_types) - 1
    if not 0 <= min(types) <= max(types) <= most:
        raise ValueError(f"text {index} has the token type {max(types)}; types of this model are 0 to {most}")
