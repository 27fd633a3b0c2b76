"""Drafts for models with states, and from draft models with states, change no token."""

from __future__ import annotations

import pytest

from pace.llm.configs import SamplingConfig
from pace.llm.engine.drafter import NoDraft
from pace.llm.generator import Generator
from tests.llm.constraints.masks import FunctionMask, MaskedModel, random_allowed, with_mask
from tests.llm.fake_model import FakeModel, FakeTokenizer, engine_of, greedy
from tests.llm.generators import check_idle, what_matters
from tests.llm.speculation.drafters import SOURCES, make_generator, make_source, repetitive_prompts

WITH_STATES = [{"num_states": 2}, {"num_states": 1, "windows": ()}, {"num_states": 1, "windows": (20, None)}]
"""Arguments of models with states: with attention, without, and with a window."""


def model_of(options: dict) -> FakeModel:
    return FakeModel(eos_bias=-50.0, **options)


@pytest.mark.parametrize("name", SOURCES)
def test_drafts_on_or_off(name: str) -> None:
    """The models with and without states take turns as target and draft model."""
    for number, options in enumerate(WITH_STATES, SOURCES.index(name)):
        draft_options = [{}, *WITH_STATES][number % 4] if name not in ("lookup", "random") else {}
        config = SamplingConfig(
            max_new_tokens=24, do_sample=number % 2 == 1, seed=5, num_return_sequences=1 + number % 2
        )
        prompts = repetitive_prompts(number, 4)
        length = (1, 3, 7)[number % 3]
        generator = make_generator(make_source(name, **draft_options), length, model=model_of(options))
        expected = make_generator(model=model_of({})).generate(prompts, config)
        out = generator.generate(prompts, config)
        assert out.generated_token_ids == expected.generated_token_ids, f"{options}, {draft_options}, {length} drafts"
        assert out.metrics.num_drafted_tokens > 0 or name in ("lookup", "random")
        check_idle(generator)
        assert generator.engine.drafter.memory().cache_used == 0


@pytest.mark.parametrize("name", ["half", "pard-half", "random"])
@pytest.mark.parametrize("num_slots", [2, 3, 6])
def test_few_slots(name: str, num_slots: int) -> None:
    options = {} if name == "random" else WITH_STATES[0]
    source = make_source(name, 9, **options)
    cache_options = {"prefix_cache_bytes": None}
    limits = {"num_blocks": 30, "num_slots": num_slots, "max_tokens_per_step": 24, "cache_options": cache_options}
    generator = make_generator(source, 5, model=model_of(WITH_STATES[num_slots % 2]), **limits)
    prompts = repetitive_prompts(3, 6, longest=45)
    for _ in range(2):
        out = generator.generate(prompts, SamplingConfig(max_new_tokens=30))
        assert out.generated_token_ids == [greedy(generator.engine.model, prompt, 30) for prompt in prompts]
        check_idle(generator, used_bytes=None)


class Counted(NoDraft):
    """Proposes `most` tokens in each step. The number of right ones goes round."""

    def __init__(self, model: FakeModel, most: int, stride: int) -> None:
        self.model, self.most, self.stride, self.num_right = model, most, stride, 0

    def extend(self, spans, cache) -> None:
        for span in spans:
            sequence = span.sequence
            room = min(self.most, sequence.max_length - len(sequence.tokens) - 1)
            if span.num_rows == 1 and room > 0 and cache.reserve(sequence, len(sequence.tokens) + room):
                right = greedy(self.model, sequence.tokens, min(room, self.num_right))
                wrong = (greedy(self.model, [*sequence.tokens, *right], 1)[0] + 1) % 50
                span.drafts = [*right, *[wrong] * (room - len(right))]
                self.num_right = (self.num_right + self.stride) % (self.most + 1)


@pytest.mark.parametrize("options", WITH_STATES)
@pytest.mark.parametrize("most, stride", [(4, 1), (4, 2), (4, 0), (1, 1)])
def test_every_number_of_accepted_drafts(options: dict, most: int, stride: int) -> None:
    """One after each other. With a stride of 0 none is right."""
    model = model_of(options)
    drafter = Counted(model, most, stride)
    engine = engine_of(model, 100, drafter=drafter, cache_options={"max_drafts": most, "prefix_cache_bytes": None})
    generator = Generator(engine, FakeTokenizer(), SamplingConfig(eos_token_id=0))
    for prompt in ([5, 6, 7], [5, 6, 7] * 20):
        out = generator.generate([prompt], SamplingConfig(max_new_tokens=60))
        assert out.generated_token_ids == [greedy(model, prompt, 60)]
        assert (out.metrics.num_accepted_tokens > 0) == bool(stride)
    check_idle(generator, used_bytes=None)


def test_no_more_drafts_than_the_journal_has_rows() -> None:
    model = model_of(WITH_STATES[0])
    generator = make_generator(make_source("perfect"), 7, model=model, cache_options={"max_drafts": 2})
    out = generator.generate([[1, 2, 3]], SamplingConfig(max_new_tokens=30))
    assert out.generated_token_ids == [greedy(model, [1, 2, 3], 30)]
    assert out.metrics.num_drafted_tokens == out.metrics.num_accepted_tokens == 19, (
        "two in each of nine steps, and the last"
    )


def test_a_shadow_reads_again_only_since_it_last_drafted() -> None:
    length, prompt = 4, list(range(1, 41))
    source = make_source("half", **WITH_STATES[1])
    read = []
    source.model.hook = lambda batch: read.append(len(batch.tokens))
    generator = make_generator(source, length, model=model_of(WITH_STATES[1]))
    out = generator.generate([prompt], SamplingConfig(max_new_tokens=50))
    assert 0 < out.metrics.num_accepted_tokens < out.metrics.num_drafted_tokens
    assert read[0] == 40 and max(read[1:]) <= length


@pytest.mark.parametrize("name", [None, "half", "random"])
@pytest.mark.parametrize("options", WITH_STATES)
def test_forced_tokens(name: str | None, options: dict) -> None:
    """Also those that are certain, and texts that stop among them."""
    generator = make_generator(name and make_source(name), 3, model=FakeModel(**options))
    num_forced = 0
    for seed, prompt in enumerate(repetitive_prompts(7, 4)):
        for config in (SamplingConfig(), SamplingConfig(logprobs=1), SamplingConfig(stop_strings=["ab", "q", "c"])):
            model = MaskedModel(random_allowed(seed), len(prompt))
            expected = make_generator(model=model).generate(prompt, with_mask(config, None))
            out = generator.generate(prompt, with_mask(config, FunctionMask(random_allowed(seed), True)))
            assert what_matters(out) == what_matters(expected)
            num_forced += out.metrics.num_forced_tokens
    assert num_forced > 0
    check_idle(generator)
