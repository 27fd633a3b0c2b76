"""Drafts change the speed of generation, but never the text."""

from __future__ import annotations

import functools
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pace.llm.clients.scoring import score
from pace.llm.clients.session import Session
from pace.llm.configs import SamplingConfig
from pace.llm.sampling.logits import LogitsProcessor
from pace.llm.sequence import NullSink, Sequence
from tests.llm.engine.failing import WatchedEngine, fails_before_line, in_files
from tests.llm.engine.test_engine import make_sequence
from tests.llm.fake_model import FakeModel, greedy
from tests.llm.generators import check_idle, what_matters
from tests.llm.speculation import drafters
from tests.llm.speculation.drafters import SOURCES, RandomDrafts, make_generator, make_source, repetitive_prompts
from tests.plugins.tiers import sample


class Grammar(LogitsProcessor):
    """Allows only tokens whose sum with the previous token is even. Keeps the tokens as its state."""

    def __init__(self) -> None:
        self.stack: list[int] = []

    def accept(self, token: int) -> None:
        self.stack.append(token)

    def rollback(self, num_tokens: int) -> None:
        del self.stack[len(self.stack) - num_tokens :]

    def apply(self, logits: torch.Tensor) -> None:
        logits[(self.stack[-1] + 1) % 2 :: 2] = -torch.inf


CONFIGS = {
    "greedy": SamplingConfig(),
    "sampled": SamplingConfig(do_sample=True, seed=3, top_k=0),
    "cooler": SamplingConfig(do_sample=True, seed=5, temperature=0.4, top_p=0.9, min_p=0.01),
    "penalties": SamplingConfig(do_sample=True, seed=3, repetition_penalty=1.3, frequency_penalty=0.2),
    "no repeats": SamplingConfig(no_repeat_ngram_size=2),
    "logprobs": SamplingConfig(logprobs=3),
    "prompt logprobs": SamplingConfig(prompt_logprobs=2),
    "stop strings": SamplingConfig(stop_strings=["ab", "q", "xx"]),
    "short": SamplingConfig(max_new_tokens=3, ignore_eos=True),
    "grammar": SamplingConfig(logits_processors=[Grammar()]),
    "callable": SamplingConfig(
        do_sample=True, seed=9, logits_processors=[lambda ids, logits: logits * (1 + 0.1 * (ids.shape[1] % 3))]
    ),
}


def asked(length: int, config: str) -> tuple[list[list[int]], SamplingConfig]:
    return repetitive_prompts(length, 3), CONFIGS[config].copy().merge_from(SamplingConfig(max_new_tokens=24))


@functools.cache
def without_drafts(length: int, config: str):
    return what_matters(make_generator().generate(*asked(length, config)))


LENGTHS = [1, 2, 5, 16]


@pytest.mark.parametrize("is_product", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", SOURCES)
def test_drafts_on_or_off(name: str, is_product: bool) -> None:
    """Runs every config with one draft length, or with all. The lengths take turns, so that over all sources every
    config runs with every length."""
    for number, config in enumerate(CONFIGS, SOURCES.index(name)):
        for length in LENGTHS if is_product else [LENGTHS[number % len(LENGTHS)]]:
            drafted = make_generator(make_source(name), length)
            out = drafted.generate(*asked(length, config))
            assert what_matters(out) == without_drafts(length, config), f"{config}, {length} drafts"
            assert out.metrics.num_drafted_tokens > 0 or name in ("lookup", "random"), f"{config}, {length} drafts"
            check_idle(drafted)


def plain_tokens(prompts: list[list[int]], config: SamplingConfig) -> list[list[int]]:
    """Returns the tokens generated without drafts."""
    return make_generator().generate(prompts, config).generated_token_ids


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("count", sample([1, 2, 19], lambda count: count == 2))
def test_alone_or_in_a_batch(name: str, count: int) -> None:
    prompts = repetitive_prompts(count, count)
    config = SamplingConfig(do_sample=True, seed=8, max_new_tokens=15, temperature=0.7)
    generator = make_generator(make_source(name), 3, max_sequences_per_step=16)
    out = generator.generate(prompts, config)
    assert out.generated_token_ids == [plain_tokens([prompt], config)[0] for prompt in prompts]
    check_idle(generator)


SMALL = list(itertools.product(SOURCES, [(6, 400), (9, 3), (400, 2), (7, 6)]))


@pytest.mark.parametrize("case", sample(SMALL, lambda case: case in SMALL[::5]), ids=str)
def test_caches_too_small_for_all(case: tuple[str, tuple[int, int]]) -> None:
    name, (num_blocks, num_draft_blocks) = case
    prompts = repetitive_prompts(3, 9, longest=45)
    config = SamplingConfig(max_new_tokens=40, ignore_eos=True)
    generator = make_generator(make_source(name, num_draft_blocks), 5, num_blocks=num_blocks, max_tokens_per_step=24)
    out = generator.generate(prompts, config)
    assert out.generated_token_ids == [greedy(generator.engine.model, prompt, 40) for prompt in prompts]
    check_idle(generator)
    assert generator.engine.drafter.memory().cache_used == 0


CACHES = {
    "bmc": {"kv_cache_type": "bmc"},
    "bmc-16": {"kv_cache_type": "bmc", "bmc_rows": 16},
    "dynamic": {"kv_cache_type": "dynamic"},
    "prefix": {"prefix_cache_bytes": None},
}
KINDS = list(itertools.product(SOURCES, CACHES, [8, 400]))


@pytest.mark.parametrize("case", sample(KINDS, lambda case: case in KINDS[::7]), ids=str)
def test_every_kind_of_cache(case: tuple[str, str, int]) -> None:
    name, kind, num_blocks = case
    prompts = repetitive_prompts(7, 4, longest=45)
    config = SamplingConfig(max_new_tokens=40)
    generator = make_generator(make_source(name), 5, num_blocks=num_blocks, cache_options=CACHES[kind])
    for _ in range(2):
        out = generator.generate(prompts, config)
        assert out.generated_token_ids == [greedy(generator.engine.model, prompt, 40, (0,)) for prompt in prompts]
        check_idle(generator)


@pytest.mark.parametrize("name", ["perfect", "pard-perfect"])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_drafts_that_are_right_are_all_kept(name: str, length: int) -> None:
    model = FakeModel(eos_bias=-50.0)
    source = make_source(name)
    source.model.eos_bias = -50.0
    generator = make_generator(source, length, model=model)
    out = generator.generate([5, 6, 7], SamplingConfig(max_new_tokens=1 + 5 * (length + 1)))
    assert out.generated_token_ids == [greedy(model, [5, 6, 7], 1 + 5 * (length + 1))]
    assert out.metrics.num_accepted_tokens == out.metrics.num_drafted_tokens == 5 * length
    assert model.num_calls == 1 + 5, "the prompt, and five steps of one token and its drafts"
    assert source.model.num_calls == 5 * (1 if name == "pard-perfect" else length)


@pytest.mark.parametrize("name", ["perfect", "never", "pard-perfect"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 6, 11])
def test_nothing_is_computed_beyond_the_length(name: str, num_tokens: int) -> None:
    model = FakeModel(eos_bias=-50.0)
    positions: list[int] = []
    model.hook = lambda batch: positions.extend(batch.positions.tolist())
    make_generator(make_source(name), 4, model=model).generate([5, 6, 7], SamplingConfig(max_new_tokens=num_tokens))
    assert max(positions) == 3 + num_tokens - 2, "the last token's successor is not asked for"


def test_drafts_that_are_wrong_are_all_dropped() -> None:
    generator = make_generator(make_source("never"), 4, model=FakeModel(eos_bias=-50.0))
    out = generator.generate([5, 6, 7], SamplingConfig(max_new_tokens=20))
    assert out.generated_token_ids == [greedy(generator.engine.model, [5, 6, 7], 20)]
    assert out.metrics.num_accepted_tokens == 0 < out.metrics.num_drafted_tokens
    assert generator.engine.model.num_calls == 20


def test_what_is_kept_is_what_agrees() -> None:
    """Compares the counts of drafted and accepted tokens with the text."""
    source = RandomDrafts()
    told: list[tuple[int, list[int]]] = []
    propose = source.propose

    def listen(sequences, lengths, kv):
        proposals = propose(sequences, lengths, kv)
        text = greedy(FakeModel(eos_bias=-50.0), [5], 120)
        for index, drafts in enumerate(proposals):
            if source.chance.random() < 0.5:
                begin = sequences[index].num_generated
                proposals[index] = drafts = text[begin : begin + len(drafts)]
            told.append((sequences[index].num_generated, list(drafts)))
        return proposals

    source.propose = listen
    out = make_generator(source, 6, model=FakeModel(eos_bias=-50.0)).generate([5], SamplingConfig(max_new_tokens=100))
    text = out.generated_token_ids[0]
    assert text == greedy(FakeModel(eos_bias=-50.0), [5], 100)
    accepted = 0
    for begin, drafts in told:
        agreeing = 0
        while agreeing < len(drafts) and begin + agreeing < 100 and drafts[agreeing] == text[begin + agreeing]:
            agreeing += 1
        accepted += agreeing
    assert out.metrics.num_drafted_tokens == sum(len(drafts) for _, drafts in told) and len(told) > 20
    assert 0 < out.metrics.num_accepted_tokens == accepted < out.metrics.num_drafted_tokens


class EndsAfterFive(LogitsProcessor):
    """Allows five tokens, then only the end, then nothing."""

    def __init__(self) -> None:
        self.length = 0

    def accept(self, token: int) -> None:
        self.length += 1

    def rollback(self, num_tokens: int) -> None:
        self.length -= num_tokens

    def apply(self, logits: torch.Tensor) -> None:
        assert self.length < 9, "asked after the end"
        logits[0] = -torch.inf if self.length < 8 else 100.0


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_beyond_the_end_fail_nothing(sampled: bool) -> None:
    source = RandomDrafts()
    config = SamplingConfig(max_new_tokens=20, do_sample=sampled, logprobs=1, logits_processors=[EndsAfterFive()])
    config.seed = 1 if sampled else None
    [text] = plain_tokens([[1, 2, 3]], config)
    assert len(text) == 6 and text[-1] == 0
    source.propose = lambda sequences, lengths, kv: [(text + [5, 6, 7])[sequences[0].num_generated :][: lengths[0]]]
    out = make_generator(source, 9).generate([1, 2, 3], config)
    assert out.generated_token_ids == [text] and len(out.logprobs[0]) == 6 and out.finish_reasons == ["stop"]


@pytest.mark.parametrize(
    "config", [SamplingConfig(), SamplingConfig(do_sample=True, seed=1), SamplingConfig(logprobs=1)]
)
def test_rows_of_wrong_drafts_may_hold_anything(config: SamplingConfig) -> None:
    """Token 48 makes the model's logits NaN. The text never contains it, but all drafts do."""
    model = FakeModel(eos_bias=-50.0)
    honest = model.logits_of

    def logits_of(tokens: list[int]) -> torch.Tensor:
        logits = honest(tokens)
        logits[48] = -100.0
        return logits * torch.nan if 48 in tokens else logits

    model.logits_of = logits_of
    config = config.copy().merge_from(SamplingConfig(max_new_tokens=20))
    plain = make_generator(model=model).generate([1, 2, 3], config).generated_token_ids
    source = RandomDrafts()
    source.propose = lambda sequences, lengths, kv: [[plain[0][sequences[0].num_generated], 48, 48][: lengths[0]]]
    out = make_generator(source, 3, model=model).generate([1, 2, 3], config)
    assert out.generated_token_ids == plain and out.metrics.num_accepted_tokens > 5
    with pytest.raises(ValueError, match="not finite|no token is left"):
        make_generator(source, 3, model=model).generate([1, 48, 3], config)


@pytest.mark.parametrize("name", ["lookup", "half", "pard-half"])
def test_samples_of_one_prompt(name: str) -> None:
    config = SamplingConfig(do_sample=True, seed=4, num_return_sequences=4, max_new_tokens=20)
    prompts = repetitive_prompts(1, 2)
    generator = make_generator(make_source(name), 4)
    assert generator.generate(prompts, config).generated_token_ids == plain_tokens(prompts, config)
    check_idle(generator)


@pytest.mark.parametrize("name", SOURCES)
def test_adaptive_lengths(name: str) -> None:
    prompts = repetitive_prompts(2, 4)
    generator = make_generator(make_source(name), 8, adaptive=True)
    for config in (SamplingConfig(max_new_tokens=60), SamplingConfig(do_sample=True, seed=2, max_new_tokens=60)):
        assert generator.generate(prompts, config).generated_token_ids == plain_tokens(prompts, config)
    check_idle(generator)


@pytest.mark.parametrize("name", SOURCES)
def test_a_text_computed_again_where_angles_change(name: str) -> None:
    """No row past the change uses the old angles, even in a step that begins before the change."""
    for prompt_length in (1, 17, 19, 20, 25):
        check_computed_again(name, prompt_length)


def check_computed_again(name: str, prompt_length: int) -> None:
    model = FakeModel(eos_bias=-50.0)
    model.recompute_length = 20
    rows: list[tuple[int, int]] = []
    model.hook = lambda batch: rows.append((int(batch.positions[0]), int(batch.positions[-1])))
    source = make_source(name)
    generator = make_generator(source, 6, model=model)
    prompt = list(range(1, prompt_length + 1))
    out = generator.generate(prompt, SamplingConfig(max_new_tokens=30))
    assert out.generated_token_ids == [greedy(model, prompt, 30)]
    assert not [(first, last) for first, last in rows if 0 < first < 19 <= last]
    assert prompt_length >= 20 or (0, 19) in rows
    check_idle(generator)


@pytest.mark.parametrize("name", SOURCES)
def test_sessions_and_scores_get_no_drafts(name: str) -> None:
    plain, drafted = make_generator(), make_generator(make_source(name), 4)
    ids = repetitive_prompts(4, 1, 40)[0] * 2
    for generator in (plain, drafted):
        generator.generate(ids, SamplingConfig(max_new_tokens=5))
    with Session(plain.driver) as ours, Session(drafted.driver) as theirs:
        for piece in (ids, [7], [8, 9]):
            assert torch.equal(ours.append(piece, logits="all"), theirs.append(piece, logits="all"))
        ours.truncate(5), theirs.truncate(5)
        assert torch.equal(ours.append([1]), theirs.append([1]))
    assert torch.equal(score(plain.driver, [ids])[0], score(drafted.driver, [ids])[0])
    check_idle(drafted)


@pytest.mark.parametrize("name", ["half", "pard-half"])
def test_whoever_hears_of_the_end_finds_nothing_left_and_all_times_noted(name: str) -> None:
    """At the end the time of the last step is noted, and the caches of the model and the draft model are free."""
    engine = drafters.make_engine(make_source(name), 4, model=FakeModel(eos_bias=-50.0))
    sequence = make_sequence(engine.model, [5, 6, 7], 6)
    seen = []

    class Sink(NullSink):
        def end(self, sequence, reason, error) -> None:
            seen.append((engine.cache.used_bytes, engine.drafter.memory().cache_used, sequence.stats.step_seconds))

    sequence.sink = Sink()
    engine.submit([sequence])
    while engine.step():
        pass
    assert sequence.stats.num_drafted > 0 and seen == [(0, 0, sequence.stats.step_seconds)]


@pytest.mark.parametrize("name", SOURCES)
def test_several_threads(name: str) -> None:
    model, prompts, config = FakeModel(eos_bias=-50.0), repetitive_prompts(3, 6), SamplingConfig(max_new_tokens=25)
    generator = make_generator(make_source(name), 4, model=model, num_blocks=30, max_sequences_per_step=5)
    with ThreadPoolExecutor(6) as threads:
        results = threads.map(lambda prompt: generator.generate(prompt, config).generated_token_ids, prompts)
    assert list(results) == [[greedy(model, prompt, 25)] for prompt in prompts]
    check_idle(generator)


@pytest.mark.parametrize("name", SOURCES)
def test_streams_dropped_half_way_leave_nothing(name: str) -> None:
    generator = make_generator(make_source(name), 4, model=FakeModel(eos_bias=-50.0))
    chance = random.Random(2)
    for prompt in repetitive_prompts(5, 16):
        stream = generator.stream(prompt, SamplingConfig(max_new_tokens=40))
        for _ in range(chance.randint(0, 9)):
            next(stream)
        stream.close()
    check_idle(generator)
    assert generator.engine.drafter.memory().cache_used == 0


def failing_engine(name: str, adaptive: bool, num_tokens: int) -> tuple[WatchedEngine, list[Sequence]]:
    """Returns an engine that runs two of three sequences at a time, and the sequences."""
    source = make_source(name, num_blocks=8)
    engine = drafters.make_engine(source, 4, adaptive, kind=WatchedEngine, max_sequences_per_step=2)
    sequences = [make_sequence(engine.model, prompt, num_tokens) for prompt in repetitive_prompts(6, 3)]
    engine.submit(sequences)
    return engine, sequences


@pytest.mark.parametrize("name", ["lookup", "half", "pard-half"])
@pytest.mark.parametrize("first", sample([10, 97], lambda first: first == 10))
def test_a_step_that_fails_at_any_line_of_drafting(name: str, first: int) -> None:
    within = in_files("drafter.py", "draft_model.py", "prompt_lookup.py", "draft_length.py", "manager.py")
    num_failed = 0
    for number in range(first, 4000, 174):
        engine, sequences = failing_engine(name, adaptive=number % 2 == 0, num_tokens=30)
        is_reached = fails_before_line(number, engine, within)
        engine.finish()
        num_failed += len(engine.check_outcomes(sequences))
        if not is_reached:
            break
    assert num_failed > 7


@pytest.mark.parametrize("name", ["half", "pard-half"])
def test_a_step_that_fails_while_a_shadow_is_found_cut_or_dropped_leaks_none(name: str) -> None:
    names = ("_make_room", "settle", "forget", "_forget")
    for number in range(1, 1000, 3):
        engine, sequences = failing_engine(name, adaptive=False, num_tokens=6)
        is_reached = fails_before_line(number, engine, lambda code: code.co_name in names)
        engine.finish()
        engine.check_outcomes(sequences)
        if not is_reached:
            break
    assert not is_reached and number > 50, "every third line was struck"
