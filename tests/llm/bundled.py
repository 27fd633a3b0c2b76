"""The bundled model in float32, alone and with drafts of both kinds, open once for all tests that ask for it."""

from __future__ import annotations

import functools

from pace.assets import TINY, TINY_DRAFT
from pace.llm import DraftModelConfig, LLMModel, PromptLookupConfig

KINDS = ["plain", "lookup", "draft"]


def bundled(kind: str = "plain") -> LLMModel:
    """The texts of all kinds are the same."""
    return _opened(kind)


@functools.cache
def _opened(kind: str) -> LLMModel:
    spec = {
        "plain": None,
        "lookup": PromptLookupConfig(adaptive=False),
        "draft": DraftModelConfig(TINY_DRAFT, num_draft_tokens=4, adaptive=False),
    }[kind]
    return LLMModel(TINY, spec_config=spec, dtype="float32", progress=False)
