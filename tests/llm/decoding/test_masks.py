"""A mask beside the model gives what a model gives that has the mask built in: tokens, ends and log-probabilities."""

from __future__ import annotations

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pace.llm import LLMModel
from pace.llm.configs import SamplingConfig
from pace.llm.decoding import mask_filler
from pace.llm.decoding.logits import Processors, build_processors
from pace.llm.decoding.masks import AllowedTokens, TokenMask, fill_bits
from pace.llm.decoding.sampler import Rules, Sampling
from pace.llm.sequence import Sequence, Span
from tests.llm.bundled import bundled
from tests.llm.decoding.masks import Automaton, FunctionMask, MaskedModel, random_allowed, with_mask
from tests.llm.fake_model import FakeModel
from tests.llm.generators import by_hand, check_idle, what_matters
from tests.llm.speculation.drafters import RandomDrafts, make_generator, make_source, repetitive_prompts
from tests.plugins.tiers import sample

CONFIGS = {
    "greedy": SamplingConfig(),
    "sampled": SamplingConfig(do_sample=True, seed=3, top_k=0),
    "cooler": SamplingConfig(do_sample=True, seed=5, temperature=0.4, top_p=0.9, min_p=0.01),
    "penalties": SamplingConfig(do_sample=True, seed=3, repetition_penalty=1.3, frequency_penalty=0.2),
    "logprobs": SamplingConfig(logprobs=3),
    "sampled logprobs": SamplingConfig(do_sample=True, seed=4, logprobs=2),
    "prompt logprobs": SamplingConfig(prompt_logprobs=2),
    "stop strings": SamplingConfig(stop_strings=["ab", "q", "xx"]),
    "samples": SamplingConfig(do_sample=True, seed=8, num_return_sequences=3),
    "beams": SamplingConfig(num_beams=3, num_return_sequences=2, logprobs=1),
    "sampled beams": SamplingConfig(num_beams=3, do_sample=True, seed=2, temperature=1.5, repetition_penalty=1.2),
}
SOURCES = [None, "lookup", "perfect", "half", "pard-half", "random"]


@functools.cache
def built_in(name: str, seed: int, prompt: tuple[int, ...]):
    model = MaskedModel(random_allowed(seed), len(prompt))
    return what_matters(make_generator(model=model).generate(list(prompt), with_mask(CONFIGS[name], None)))


@pytest.mark.parametrize("num_prompts", [1, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_masks(name: str, num_prompts: int) -> None:
    """With every source of drafts, forcing tokens and not; each on one prompt of four in turn, or on all."""
    prompts = list(enumerate(repetitive_prompts(7, 4)))
    for number, (source, forces) in enumerate(itertools.product(SOURCES, [False, True]), list(CONFIGS).index(name)):
        generator = make_generator(source and make_source(source), 4)
        for seed, prompt in (prompts * 2)[number % 4 :][:num_prompts]:
            mask, what = FunctionMask(random_allowed(seed), forces), f"{source=}, {forces=}, {seed=}"
            out = generator.generate(prompt, with_mask(CONFIGS[name], mask))
            assert what_matters(out) == built_in(name, seed, tuple(prompt)), what
            assert bool(out.metrics.num_forced_tokens) == (forces and "beams" not in name), what
            assert mask.tokens == [], "the mask that was named is not used itself"
        check_idle(generator)


MIXED = list(itertools.product(SOURCES, [(9, 3), (400, 3), (400, 0)], [False, True]))


@pytest.mark.parametrize("case", sample(MIXED, lambda case: case in MIXED[::5]), ids=str)
def test_masked_and_unmasked_rows_in_one_batch(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the cache is too small for all, so that sequences give way and are computed again."""
    source, (num_blocks, num_spare), releases_gil = case
    monkeypatch.setattr(mask_filler, "num_spare_cpus", lambda: num_spare)
    limits = {"num_blocks": num_blocks, "max_tokens_per_step": 24, "max_sequences_per_step": 16}
    generator = make_generator(source and make_source(source, 60), 4, **limits)
    prompts = repetitive_prompts(3, 18, longest=30)
    names = [name for name in CONFIGS if "beams" not in name and name != "samples"]
    asked, expected = [], []
    for index, prompt in enumerate(prompts):
        name = names[index % len(names)]
        if index % 3:
            mask = FunctionMask(random_allowed(index % 3), index % 2 == 0, releases_gil)
            expected.append(built_in(name, index % 3, tuple(prompt)))
        else:
            mask = None
            expected.append(what_matters(make_generator().generate(prompt, with_mask(CONFIGS[name], None))))
        asked.append((prompt, with_mask(CONFIGS[name], mask)))
    with by_hand(generator):
        requests = [generator.add_request(*request) for request in asked]
    outs = [request.result() for request in requests]
    assert list(map(what_matters, outs)) == expected
    assert (sum(out.metrics.num_preemptions for out in outs) > 0) == (num_blocks == 9)
    assert sum(out.metrics.num_forced_tokens for out in outs) > 10
    check_idle(generator)


# -- drafts and forced tokens --------------------------------------------------------------------------------------------


def test_drafts_that_are_not_allowed_never_reach_the_model() -> None:
    model, allowed = FakeModel(eos_bias=-50.0), range(5, 40)
    computed: list[int] = []
    model.hook = lambda batch: computed.extend(batch.tokens.tolist())
    generator = make_generator(RandomDrafts(), 6, model=model)
    out = generator.generate([6, 7], with_mask(SamplingConfig(), AllowedTokens(allowed), 40))
    assert set(computed) <= set(allowed) and len(computed) > 2 + 39
    assert out.metrics.num_drafted_tokens == len(computed) - 2 - 39 + out.metrics.num_accepted_tokens


@pytest.mark.parametrize("sampled", [False, True])
def test_forced_tokens_take_one_step_together_and_no_logits(sampled: bool) -> None:
    """A skeleton with two places to choose at: three steps, of which the first reads the prompt."""
    table = {state: {token: state + 1} for state, token in enumerate([5, 6, 7, 0, 8, 9, 0, 10, 11, 12])}
    table[3], table[6] = {20: 4, 21: 4, 22: 4}, {30: 7, 31: 7}
    model = FakeModel()
    rows: list[tuple[int, int]] = []
    model.hook = lambda batch: rows.append((len(batch.tokens), len(batch.logit_rows)))
    generator = make_generator(model=model)
    config = with_mask(SamplingConfig(do_sample=sampled, seed=2 if sampled else None), Automaton(table), 100)
    out = generator.generate([1, 2, 3, 4], config)
    (tokens,) = out.generated_token_ids
    assert tokens[:3] == [5, 6, 7] and tokens[4:6] == [8, 9] and tokens[7:] == [10, 11, 12]
    assert tokens[3] in (20, 21, 22) and tokens[6] in (30, 31) and out.finish_reasons == ["stop"]
    assert rows == [(4 + 3, 1), (1 + 2, 1), (1 + 3, 1)]
    assert out.metrics.num_forced_tokens == 3 + 2 + 2, "the last one is what its step brings anyway"
    assert out.metrics.num_drafted_tokens == 0 and "7 forced" in str(out.metrics)
    check_idle(generator)


@pytest.mark.parametrize("name", ["greedy", "logprobs"])
def test_nothing_is_computed_beyond_the_length(name: str) -> None:
    allowed = random_allowed(5, share_forced=0.9)
    for num_tokens in range(1, 13):
        model, positions = FakeModel(), []
        model.hook = lambda batch, positions=positions: positions.extend(batch.positions.tolist())
        out = make_generator(model=model).generate([1, 2], with_mask(CONFIGS[name], FunctionMask(allowed), num_tokens))
        plain = make_generator().generate([1, 2], with_mask(CONFIGS[name], FunctionMask(allowed, False), num_tokens))
        assert what_matters(out) == what_matters(plain), num_tokens
        assert max(positions) < 2 + num_tokens - 1, num_tokens


@pytest.mark.parametrize("name", ["greedy", "logprobs"])
@pytest.mark.parametrize("budget", [{"max_tokens_per_step": 6}, {"max_logit_rows_per_step": 5}], ids=str)
def test_a_step_stays_within_its_budget(name: str, budget: dict) -> None:
    model, sizes = FakeModel(), []
    model.hook = lambda batch: sizes.append((len(batch.tokens), len(batch.logit_rows)))
    generator = make_generator(model=model, **budget)
    allowed = random_allowed(5, share_forced=0.9)
    config = with_mask(CONFIGS[name], FunctionMask(allowed), 30)
    out = generator.generate([[1, 2], [3], [4]], config)
    plain = make_generator().generate([[1, 2], [3], [4]], with_mask(CONFIGS[name], FunctionMask(allowed, False), 30))
    assert what_matters(out) == what_matters(plain) and out.metrics.num_forced_tokens > 10
    assert all(tokens <= budget.get("max_tokens_per_step", 512) for tokens, _ in sizes)
    assert all(rows <= budget.get("max_logit_rows_per_step", 512) for _, rows in sizes)


@pytest.mark.parametrize("prompt_length", [1, 17, 19, 20, 25])
def test_a_text_computed_again_where_angles_change(prompt_length: int) -> None:
    model, rows = FakeModel(), []
    model.recompute_length = 20
    model.hook = lambda batch: rows.append((int(batch.positions[0]), int(batch.positions[-1])))
    allowed = random_allowed(5, share_forced=0.9)
    prompt = list(range(1, prompt_length + 1))
    out = make_generator(model=model).generate(prompt, with_mask(SamplingConfig(), FunctionMask(allowed), 30))
    plain = make_generator().generate(prompt, with_mask(SamplingConfig(), FunctionMask(allowed, False), 30))
    assert what_matters(out) == what_matters(plain) and out.metrics.num_forced_tokens > 5
    assert not [(first, last) for first, last in rows if 0 < first < 19 <= last]
    assert prompt_length >= 20 or any(first == 0 and last >= 19 for first, last in rows)


@pytest.mark.parametrize("forces", [False, True])
def test_a_processor_that_bans_a_forced_token_is_heard(forces: bool) -> None:
    mask = FunctionMask(lambda tokens: frozenset([5 + len(tokens) % 20]), forces)
    config = with_mask(SamplingConfig(bad_words_ids=[[9]]), mask)
    with pytest.raises(ValueError, match="after 4 generated tokens no token is left to pick.*token_mask"):
        make_generator().generate([1], config)


@pytest.mark.parametrize("forces", [False, True])
def test_text_ends_within_forced_tokens(forces: bool) -> None:
    mask = FunctionMask(lambda tokens: frozenset([5 + len(tokens) % 20]), forces)
    for config, tokens, text in (
        (SamplingConfig(stop_strings=["hi"]), [5, 6, 7, 8], "fg"),
        (SamplingConfig(eos_token_id=8), [5, 6, 7, 8], "fghi"),
        (SamplingConfig(max_new_tokens=3), [5, 6, 7], "fgh"),
    ):
        generator = make_generator()
        out = generator.generate([1], with_mask(config, mask))
        assert out.generated_token_ids == [tokens] and out.texts == [text]
        check_idle(generator)


# -- masks themselves ----------------------------------------------------------------------------------------------------


def test_bits_are_the_lowest_first() -> None:
    row = torch.full((3,), 77, dtype=torch.int32)
    fill_bits(row, [0, 1, 31, 33, 64])
    assert row.tolist() == [3 - 2**31, 2, 1]
    fill_bits(row, [])
    assert row.tolist() == [0, 0, 0]
    for beyond in ([96], [-1]):
        with pytest.raises(ValueError, match="a mask of 96 bits has no place for the token"):
            fill_bits(row, beyond)


def test_what_is_no_mask_is_told() -> None:
    for wrong in (5, "a", AllowedTokens, object(), [AllowedTokens([1])]):
        with pytest.raises(TypeError, match="token_mask must be a pace.llm.TokenMask"):
            SamplingConfig(token_mask=wrong)
    with pytest.raises(ValueError, match="name at least one"):
        AllowedTokens([])
    with pytest.raises(ValueError, match="no place for the token 5000"):
        make_generator().generate([1], with_mask(SamplingConfig(), AllowedTokens([5000])))
    for method, arguments in (("fill", (None,)), ("accept", (1,)), ("rollback", (1,)), ("count_allowed", ([1],))):
        with pytest.raises(NotImplementedError, match=f"TokenMask must define {method}"):
            getattr(TokenMask(), method)(*arguments)


def test_configs_with_one_mask_are_equal() -> None:
    config = with_mask(SamplingConfig(), AllowedTokens([1]))
    assert config == config.copy() == SamplingConfig().merge_from(config)


def test_forks_go_their_own_ways() -> None:
    for mask in (Automaton({0: {1: 1, 2: 0}, 1: {3: 0}}), FunctionMask(random_allowed(1)), AllowedTokens([1, 2, 3])):
        row, fresh, other = (torch.empty(2, dtype=torch.int32) for _ in range(3))
        mask.fill(fresh)
        twin = mask.fork()
        token = next(token for token in range(50) if mask.count_allowed([token]))
        twin.accept(token)
        mask.fill(row)
        assert torch.equal(row, fresh)
        twin.fill(other)
        twin.rollback(1)
        twin.fill(row)
        assert torch.equal(row, fresh)


# -- the bundled model, row by row in Python -----------------------------------------------------------------------------


native = pytest.importorskip("pace.ops.native", reason="the kernels are not built")


def row_by_row(model: LLMModel, prompt: list[int], config: SamplingConfig, allowed, num_tokens: int):
    """Tokens and log-probabilities, a row at a time."""
    config = config.copy().merge_from(SamplingConfig())
    processors = Processors(build_processors(config, len(prompt), []))
    strategy = Sampling(processors, Rules.of(config), config.seed or 0, config.logprobs)
    sequence = Sequence(prompt, strategy, None, 1000)
    with model.session() as session:
        logits = session.append(prompt)
        for _ in range(num_tokens):
            may_follow = allowed(tuple(sequence.generated))
            logits[0, [token for token in range(logits.shape[1]) if token not in may_follow]] = -torch.inf
            (token,) = strategy.choose(native, logits, Span(sequence, 0, 1))
            sequence.append(token)
            logits = session.append([token])
    return sequence.generated, sequence.logprobs


@pytest.mark.parametrize("name", ["greedy", "sampled", "cooler", "penalties", "logprobs", "sampled logprobs"])
def test_the_bundled_model(name: str) -> None:
    plain = bundled("plain")
    prompt = plain.tokenizer("Once upon a time, there was a")["input_ids"]
    allowed = random_allowed(3, plain.config.vocab_size, share_forced=0.4)
    tokens, logprobs = row_by_row(plain, prompt, CONFIGS[name], allowed, 24)
    for kind in ("plain", "lookup", "draft"):
        for forces in (False, True):
            config = with_mask(CONFIGS[name], FunctionMask(allowed, forces))
            out = bundled(kind).generate([prompt], config.copy().merge_from(SamplingConfig(ignore_eos=True)))
            assert out.generated_token_ids == [tokens]
            assert out.logprobs == (None if CONFIGS[name].logprobs is None else [logprobs])


@pytest.mark.parametrize("kind", sample(["plain", "lookup", "draft"], lambda kind: kind == "draft"))
def test_the_bundled_model_with_few_and_many_tokens(kind: str) -> None:
    """Masked beside unmasked rows, several samples of each."""
    plain = bundled("plain")
    prompts = ["Once upon a time", "1, 2, 3, 1, 2, 3,", "The capital of France is"]
    free = SamplingConfig(max_new_tokens=20, ignore_eos=True, do_sample=True, seed=5, logprobs=1)
    free.num_return_sequences = 2
    masked = free.copy().merge_from(SamplingConfig(token_mask=AllowedTokens(range(100, 1500))))
    asked = list(itertools.product(prompts, (free, masked)))
    expected = [what_matters(plain.generate(*each)) for each in asked]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda each: what_matters(bundled(kind).generate(*each)), asked)) == expected
