"""The engines under stress, with several models, draft sources and caches."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from pace.llm.configs import SamplingConfig
from pace.llm.engine.drafter import Drafter, NoDraft
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.sampling.sampler import Sampling
from pace.llm.speculation.draft_length import FixedLength
from pace.llm.speculation.drafter import SpeculativeDrafter
from pace.llm.speculation.prompt_lookup import PromptLookup
from tests.llm.engine.stress.world import VOCAB
from tests.llm.fake_model import FakeModel, FakeTokenizer, engine_of, greedy
from tests.llm.speculation.drafters import make_source


class TrueDrafts(NoDraft):
    """Proposes the greedy continuation, with a wrong token at random places."""

    def __init__(self, model: FakeModel) -> None:
        self.model, self.chance = model, random.Random(1)

    def extend(self, spans, cache) -> None:
        for span in spans:
            sequence = span.sequence
            room = min(self.chance.randint(0, 4), sequence.max_length - len(sequence.tokens) - 1)
            if (
                isinstance(sequence.strategy, Sampling)
                and span.num_rows == 1
                and room > 0
                and cache.reserve(sequence, len(sequence.tokens) + room)
            ):
                span.drafts = [
                    token if self.chance.random() < 0.7 else (token + 1) % VOCAB
                    for token in greedy(self.model, sequence.tokens, room)
                ]


def true_drafts() -> Drafter:
    return TrueDrafts(FakeModel(eos_bias=-2.0))


def draft_model(**model_options: Any) -> Drafter:
    """Returns a drafter that is right part of the time, with a draft cache too small for all sequences."""
    source = make_source("half", num_blocks=12, **model_options)
    return SpeculativeDrafter(source, FixedLength(4), 4)


def prompt_lookup() -> Drafter:
    return SpeculativeDrafter(PromptLookup(1, 3), FixedLength(5), 5)


def fake(
    num_blocks: int = 14,
    drafter: Drafter | None = None,
    windows: tuple[int | None, ...] = (None, None),
    num_states: int = 0,
    num_slots: int = 10_000,
    **options: Any,
) -> tuple[Generator, Generator]:
    """Returns engines on fake models, whose logits show every mistake in the cache."""

    def make(num_blocks: int, num_slots: int, **options: Any) -> Generator:
        model = FakeModel(eos_bias=-2.0, windows=windows, num_states=num_states)
        engine = engine_of(model, num_blocks, num_slots, **options)
        return Generator(engine, FakeTokenizer(), SamplingConfig(eos_token_id=0))

    return make(num_blocks, num_slots, drafter=drafter, **options), make(10_000, 10_000)


@functools.cache
def tiny_model(kv_cache_dtype: str):
    from pace.assets import TINY
    from pace.llm import LLMModel

    return [
        LLMModel(TINY, dtype="float32", kv_cache_dtype=kv_cache_dtype, progress=False, prefix_cache_bytes=0)
        for _ in range(2)
    ]


def tiny(num_blocks: int = 16, kv_cache_dtype: str = "auto", **options: Any) -> tuple[Generator, Generator]:
    """Returns engines on the bundled model and the native kernels, with the same dtype of keys and values."""
    model, other = tiny_model(kv_cache_dtype)
    engine = Engine.create(
        model._engine.model, model._engine.ops, num_blocks * model._engine.cache.spec.block_bytes, **options
    )
    return Generator(engine, model.tokenizer, model._generator.defaults), other._generator


SMALL_STEPS = {"max_tokens_per_step": 40, "max_sequences_per_step": 5}
WITH_PREFIXES = {"cache_options": {"prefix_cache_bytes": None}}
"""Engine options: small steps, and a cache that keeps prefixes."""

WITH_DRAFTS = {"cache_options": {"prefix_cache_bytes": None, "max_drafts": 4}}
"""The same for a model with states, with a journal of four rows."""

WORLDS: dict[str, Callable[[], tuple[Generator, Generator]]] = {
    "fake": lambda: fake(max_tokens_per_step=48, max_sequences_per_step=6),
    "drafts": lambda: fake(drafter=true_drafts(), **SMALL_STEPS),
    "draft model": lambda: fake(
        drafter=draft_model(), max_tokens_per_step=40, max_sequences_per_step=6, **WITH_PREFIXES
    ),
    "bmc": lambda: fake(18, true_drafts(), cache_options={"kv_cache_type": "bmc", "bmc_rows": 24}, **SMALL_STEPS),
    "prefix": lambda: fake(drafter=true_drafts(), **SMALL_STEPS, **WITH_PREFIXES),
    "windows": lambda: fake(10, true_drafts(), (None, 20, None, 20), **SMALL_STEPS, **WITH_PREFIXES),
    "windows everywhere": lambda: fake(drafter=true_drafts(), windows=(20, 20), **SMALL_STEPS, **WITH_PREFIXES),
    "states": lambda: fake(40, true_drafts(), num_states=2, num_slots=5, **SMALL_STEPS, **WITH_DRAFTS),
    "states alone": lambda: fake(50, true_drafts(), (), num_states=2, num_slots=4, **SMALL_STEPS, **WITH_DRAFTS),
    "states in a draft model": lambda: fake(
        14, draft_model(num_states=1), (None, 20), num_states=1, num_slots=12, **SMALL_STEPS, **WITH_DRAFTS
    ),
    "tiny": lambda: tiny(drafter=prompt_lookup(), max_tokens_per_step=64, max_sequences_per_step=6, **WITH_PREFIXES),
    "int8": lambda: tiny(
        14, "int8", drafter=prompt_lookup(), max_tokens_per_step=40, max_sequences_per_step=6, **WITH_PREFIXES
    ),
}
