"""The bundled model in float32, without drafts and with both kinds of drafts. Loaded once for all tests."""

from __future__ import annotations

import functools

from pace.assets import TINY, TINY_DRAFT
from pace.llm import DraftModelConfig, LLMModel, PromptLookupConfig

KINDS = ["plain", "lookup", "draft"]


def bundled(kind: str = "plain") -> LLMModel:
    """Returns the model with the `kind` of drafts, one of `KINDS`. All kinds generate the same texts."""
    return _opened(kind)


@functools.cache
def _opened(kind: str) -> LLMModel:
    spec = {
        "plain": None,
        "lookup": PromptLookupConfig(adaptive=False),
        "draft": DraftModelConfig(TINY_DRAFT, num_draft_tokens=4, adaptive=False),
    }[kind]
    return LLMModel(TINY, spec_config=spec, dtype="float32", progress=False)
