"""Engines on a fake model, with draft sources that are always, sometimes or never right."""

from __future__ import annotations

import random

import torch

from pace.llm.cache.manager import CacheManager
from pace.llm.configs import SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.speculation.draft_length import AdaptiveLength, FixedLength
from pace.llm.speculation.draft_model import DraftModel, ParallelDraftModel
from pace.llm.speculation.drafter import SpeculativeDrafter
from pace.llm.speculation.prompt_lookup import PromptLookup
from tests.llm.fake_model import OPS, FakeModel, FakeTokenizer, engine_of

MASK = 49
"""Mask token of the parallel draft models below."""


class HalfRight(FakeModel):
    """Returns the logits of a `FakeModel` after two thirds of the texts, and reversed ones after the rest."""

    def logits_of(self, tokens: list[int]) -> torch.Tensor:
        logits = super().logits_of(tokens)
        return logits if sum(tokens) % 3 else logits.flip(0)


class NeverRight(FakeModel):
    """Gives nearly all probability to the token that a `FakeModel` finds least likely."""

    def logits_of(self, tokens: list[int]) -> torch.Tensor:
        logits = super().logits_of(tokens)
        wrong = torch.full_like(logits, -100.0)
        wrong[int(logits.argmin())] = 0.0
        return wrong


def parallel(base: type[FakeModel]) -> type[FakeModel]:
    """Returns a subclass that reads m mask tokens at the end as the m tokens it would have generated there."""

    class Parallel(base):
        def logits_of(self, tokens: list[int]) -> torch.Tensor:
            text = list(tokens)
            while text[-1] == MASK:
                text.pop()
            for _ in range(len(tokens) - len(text)):
                text.append(int(super().logits_of(text).argmax()))
            return super().logits_of(text)

    return Parallel


class RandomDrafts(PromptLookup):
    """Proposes random tokens."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(1, 1)
        self.chance = random.Random(seed)

    def kind(self, sequence, most):
        return 0

    def propose(self, sequences, lengths, kv=None):
        return [[self.chance.randrange(50) for _ in range(self.chance.randint(0, length))] for length in lengths]


SOURCES = ["lookup", "perfect", "half", "never", "pard-perfect", "pard-half", "random"]


def make_source(name: str, num_blocks: int = 400, vocab_size: int = 50, **model_options):
    """`model_options` are those of the draft model, which may have states: in 20 slots, with up to 7 masks."""
    if name == "lookup":
        return PromptLookup(1, 3)
    if name == "random":
        return RandomDrafts()
    kind = {"perfect": FakeModel, "half": HalfRight, "never": NeverRight}[name.removeprefix("pard-")]
    model = (parallel(kind) if name.startswith("pard-") else kind)(vocab_size, **model_options)
    num_slots, max_drafts = (20, 7) if model.kv_spec.has_states else (0, 0)
    num_bytes = num_blocks * model.kv_spec.block_bytes + num_slots * model.kv_spec.slots(max_drafts).slot_bytes
    cache = CacheManager(model.kv_spec, num_bytes, max_drafts=max_drafts, num_slots=num_slots)
    arguments = model, OPS, cache, vocab_size, {}, {}
    return ParallelDraftModel(MASK, *arguments) if name.startswith("pard-") else DraftModel(*arguments)


def make_engine(
    source=None,
    length: int = 4,
    adaptive: bool = False,
    model: FakeModel | None = None,
    num_blocks: int = 400,
    kind: type[Engine] = Engine,
    num_slots: int = 20,
    cache_options: dict | None = None,
    **limits,
) -> Engine:
    """Returns an engine on a fake model. Without a `source` it does not draft. A model with states has `num_slots`."""
    model = model or FakeModel()
    drafter = None
    if source is not None:
        lengths = AdaptiveLength(length) if adaptive else FixedLength(length)
        drafter = SpeculativeDrafter(source, lengths, length, model.recompute_length)
    cache_options = {"max_drafts": length if source else 0} | (cache_options or {})
    return engine_of(model, num_blocks, num_slots, kind, drafter=drafter, cache_options=cache_options, **limits)


def make_generator(*arguments, **options) -> Generator:
    """Returns a generator on an engine of `make_engine`."""
    return Generator(make_engine(*arguments, **options), FakeTokenizer(), SamplingConfig(eos_token_id=0))


def repetitive_prompts(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    """Returns token ids in which a short part repeats."""
    chance = random.Random(seed)
    prompts = []
    for _ in range(count):
        part = [chance.randrange(1, 49) for _ in range(chance.randint(1, 8))]
        prompts.append((part * (longest // len(part) + 1))[: chance.randint(1, longest)])
    return prompts
