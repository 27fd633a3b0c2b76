"""What a GGUF file says about vectors of texts: the pooling of rows, and the matrices after it.

A file does not say whether a model normalises its vectors. llama.cpp does by default, and so do most models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pace.checkpoints.gguf.file import Metadata

DENSE = ("dense_2", "dense_3")
"""Matrices of EmbeddingGemma after pooling, in order. A file has them only if its converter was asked for them."""
HAS_DENSE = ("gemma-embedding",)
"""Architectures whose dense matrices apply to pooled rows."""
POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
"""Value of pooling_type -> name of sentence-transformers."""
ASKED, RERANKER = "Qwen3", "ForSequenceClassification"
"""Parts of the class of a Qwen3-Reranker with two answers."""
NONE, RANK = 0, 4
"""Values of pooling_type for rows of tokens, and for the scores of a reranker."""


def read_pooling(metadata: Metadata) -> str | None:
    """Returns the pooling that a file states, by its name in sentence-transformers. None if it states none, or the
    scores of a reranker. Raises ValueError for another type, NotImplementedError for another value."""
    key = f"{metadata.text('general.architecture')}.pooling_type"
    value = metadata.integer(key, NONE)
    if value in (NONE, RANK):
        return None
    if value not in POOLINGS:
        raise NotImplementedError(
            f"{metadata.path}: {key} = {value} is not implemented; implemented: {NONE} (none), "
            f"{', '.join(f'{number} ({name})' for number, name in POOLINGS.items())} and {RANK} (rank)"
        )
    return POOLINGS[value]


def asks(config: Mapping[str, Any]) -> bool:
    """True for the config of a Qwen3-Reranker, whose file has the rows of two answers in place of a head."""
    return config.get("architectures") == [f"{ASKED}{RERANKER}"]


def dense_tensors(metadata: Metadata, sources: Collection[str]) -> list[str]:
    """Returns the tensors among `sources` that apply to pooled rows, in their order."""
    if metadata.text("general.architecture") not in HAS_DENSE:
        return []
    return [f"{name}.weight" for name in DENSE if f"{name}.weight" in sources]
