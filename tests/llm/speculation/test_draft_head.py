"""Draft heads get the target's row of each token, and their drafts change no token."""

from __future__ import annotations

import itertools

import pytest

from pace.llm.clients.session import Session
from pace.llm.configs import SamplingConfig
from tests.llm.engine.test_engine import make_sequence
from tests.llm.fake_model import greedy
from tests.llm.generators import check_idle, what_matters
from tests.llm.speculation.drafters import make_engine, make_generator, repetitive_prompts
from tests.llm.speculation.heads import Target, make_head
from tests.plugins.tiers import sample

STATES = [{}, {"num_states": 2}]
"""Arguments of targets without and with states."""
PREFIXES = {"prefix_cache_bytes": None}


def drafting(length=3, num_blocks=400, num_draft_blocks=400, model=None, cache_options=None, is_right=None, **limits):
    model = model or Target()
    head = make_head(model, num_draft_blocks, **({"is_right": is_right} if is_right else {}))
    options = {"num_blocks": num_blocks, "model": model, "cache_options": cache_options, **limits}
    return make_generator(head, length, **options)


def check_texts(generator, prompts, config, expected):
    out = generator.generate(prompts, config)
    assert what_matters(out) == what_matters(expected)
    check_idle(generator, used_bytes=None)
    assert generator.engine.drafter.memory().cache_used == 0
    return out.metrics


@pytest.mark.parametrize("options", STATES)
@pytest.mark.parametrize("length", [1, 3, 7])
def test_all_drafts_are_right(options, length) -> None:
    """They are only if each token gets the row of the token before it, in prefills of any chunks, too."""
    prompts = repetitive_prompts(length, 5, longest=60)
    for config in (
        SamplingConfig(max_new_tokens=25),
        SamplingConfig(max_new_tokens=25, do_sample=True, seed=4, num_return_sequences=3, top_k=0),
    ):
        expected = make_generator(model=Target(**options)).generate(prompts, config)
        generator = drafting(length, model=Target(**options), max_tokens_per_step=24)
        metrics = check_texts(generator, prompts, config, expected)
        assert metrics.num_drafted_tokens == metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("options", STATES)
def test_some_drafts_are_right(options) -> None:
    """Rows of rejected drafts are dropped, in the target and in the head."""
    prompts = repetitive_prompts(2, 4)
    config = SamplingConfig(max_new_tokens=40)
    expected = make_generator(model=Target(**options)).generate(prompts, config)
    generator = drafting(4, model=Target(**options), is_right=lambda text: sum(text) % 3 > 0)
    metrics = check_texts(generator, prompts, config, expected)
    assert 0 < metrics.num_accepted_tokens < metrics.num_drafted_tokens


@pytest.mark.parametrize("text", [10, 40, 64])
def test_prefixes_that_the_target_does_not_compute_again(text) -> None:
    """The head takes whole blocks of them from its own prefix cache."""
    generator = drafting(3, cache_options=PREFIXES)
    head = generator.engine.drafter.source.model
    prompt, config = [1 + token % 49 for token in range(text)], SamplingConfig(max_new_tokens=20)
    expected = [greedy(generator.engine.model, prompt, 20)]
    read = []
    for _ in range(3):
        before = head.num_read
        out = generator.generate([prompt], config)
        assert out.generated_token_ids == expected
        assert out.metrics.num_drafted_tokens == out.metrics.num_accepted_tokens > 0
        read.append(head.num_read - before)
        check_idle(generator, used_bytes=None)
    assert read[1] == read[2] == read[0] - (text - 1) // 16 * 16


SMALL = list(itertools.product([(6, 400), (9, 3), (400, 2), (7, 6)], STATES, [None, PREFIXES]))


@pytest.mark.parametrize("case", sample(SMALL, lambda case: case in SMALL[::5]), ids=str)
def test_caches_too_small_for_all(case) -> None:
    """Sequences are preempted and start again, and shadows are dropped."""
    (num_blocks, num_draft_blocks), options, cache_options = case
    if options:
        num_blocks *= 2
    prompts = repetitive_prompts(3, 9, longest=45)
    config = SamplingConfig(max_new_tokens=40, ignore_eos=True)
    model = Target(**options)
    limits = {"max_tokens_per_step": 24, "cache_options": cache_options, "num_slots": 6}
    generator = drafting(5, num_blocks, num_draft_blocks, model, **limits)
    out = generator.generate(prompts, config)
    assert out.generated_token_ids == [greedy(model, prompt, 40) for prompt in prompts]
    check_idle(generator, used_bytes=None)
    assert generator.engine.drafter.memory().cache_used == 0


def test_sessions_and_beams_get_none() -> None:
    generator = drafting(3)
    session = Session(generator.driver)
    session.append([1, 2, 3], 1)
    beams = SamplingConfig(num_beams=3, max_new_tokens=8)
    expected = make_generator(model=Target()).generate([[4, 5, 6]], beams)
    assert generator.generate([[4, 5, 6]], beams).generated_token_ids == expected.generated_token_ids
    session.append([4], 1)
    session.truncate(2)
    session.append([9], 1)
    session.close()
    assert generator.engine.drafter.source.model.num_read == 0
    check_idle(generator)


def test_a_request_that_is_cancelled_in_its_prompt() -> None:
    model = Target()
    engine = make_engine(make_head(model), model=model, max_tokens_per_step=24)
    sequence = make_sequence(model, list(range(1, 46)), 5)
    engine.submit([sequence])
    engine.step()
    assert sequence.num_computed == 24 and engine.drafter.memory().cache_used > 0
    engine.abort([sequence])
    engine.check_idle()
    assert engine.drafter.memory().cache_used == 0


def test_a_failed_step_forgets_all_rows() -> None:
    generator = drafting(3)
    model, prompts, config = generator.engine.model, repetitive_prompts(5, 3), SamplingConfig(max_new_tokens=30)
    calls = itertools.count()

    def fail_once(batch) -> None:
        if next(calls) == 6:
            raise RuntimeError("once")

    head = generator.engine.drafter.source.model
    head.hook = fail_once
    with pytest.raises(RuntimeError, match="once"):
        generator.generate(prompts, config)
    out = generator.generate(prompts, config)
    assert out.generated_token_ids == [greedy(model, prompt, 30, (0,)) for prompt in prompts]
    assert out.metrics.num_drafted_tokens == out.metrics.num_accepted_tokens > 0
    check_idle(generator)
