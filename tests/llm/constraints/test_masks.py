"""A model with a mask gives the same tokens, ends and log-probabilities as a model with the mask built in."""

from __future__ import annotations

import functools
import itertools
import threading

import pytest
import torch

from pace.llm import LLMModel
from pace.llm.configs import SamplingConfig
from pace.llm.constraints import mask_filler
from pace.llm.constraints.masks import AllowedTokens
from pace.llm.sampling.logits import Processors, build_processors
from pace.llm.sampling.sampler import Sampling, rules_of
from pace.llm.sequence import Sequence, Span
from tests.llm.bundled import bundled
from tests.llm.constraints.masks import VOCAB, Automaton, FunctionMask, MaskedModel, random_allowed, with_mask
from tests.llm.fake_model import FakeModel, greedy
from tests.llm.generators import by_hand, check_idle
from tests.llm.speculation.drafters import RandomDrafts, make_generator, make_source, repetitive_prompts
from tests.plugins.tiers import quarter, sample

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


def what_matters(out):
    return (
        out.generated_token_ids,
        out.finish_reasons,
        out.texts,
        out.logprobs,
        out.prompt_logprobs,
        out.sequence_scores,
    )


@functools.cache
def built_in(name: str, seed: int, prompt: tuple[int, ...]):
    model = MaskedModel(random_allowed(seed), len(prompt))
    return what_matters(make_generator(model=model).generate(list(prompt), with_mask(CONFIGS[name], None)))


@pytest.mark.parametrize("num_prompts", [1, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_masks(name: str, num_prompts: int) -> None:
    """Runs every draft source with one of four prompts, with or without forced tokens, in turn; or all combinations."""
    prompts, first = list(enumerate(repetitive_prompts(7, 4))), list(CONFIGS).index(name) + quarter()
    pairs = list(itertools.product(SOURCES, [False, True]))
    if num_prompts == 1:
        pairs = [pairs[2 * place + (place + first) % 2] for place in range(len(SOURCES))]
    for number, (source, forces) in enumerate(pairs, first):
        generator = make_generator(source and make_source(source), 4)
        for seed, prompt in (prompts * 2)[number % 4 :][:num_prompts]:
            mask, what = FunctionMask(random_allowed(seed), forces), f"{source=}, {forces=}, {seed=}"
            out = generator.generate(prompt, with_mask(CONFIGS[name], mask))
            assert what_matters(out) == built_in(name, seed, tuple(prompt)), what
            assert bool(out.metrics.num_forced_tokens) == (forces and "beams" not in name), what
            assert mask.tokens == [], "the mask that was named is not used itself"
        check_idle(generator)


MIXED = list(itertools.product(SOURCES, [(9, 3), (400, 3), (400, 0)], [False, True]))


@pytest.mark.parametrize("case", sample(MIXED, lambda case: case in MIXED[::7]), ids=str)
def test_masked_and_unmasked_rows_in_one_batch(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the cache is too small for all, so that sequences are preempted and recomputed."""
    source, (num_blocks, num_spare), releases_gil = case
    monkeypatch.setattr(mask_filler, "num_spare_cpus", lambda: num_spare)
    generator = make_generator(
        source and make_source(source, 60), 4, num_blocks=num_blocks, max_tokens_per_step=24, max_sequences_per_step=16
    )
    prompts = repetitive_prompts(3, 15, longest=30)
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


# -- drafts and forced tokens
# --------------------------------------------------------------------------------------------


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
    """A skeleton with two places to choose at takes three steps. The first step reads the prompt."""
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


# -- ends and errors
# -----------------------------------------------------------------------------------------------------


def test_a_finished_mask_ends_its_sequence() -> None:
    mask = Automaton({0: {7: 1, 8: 1}, 1: {9: 2, 10: 2}})
    for source in SOURCES:
        generator = make_generator(source and make_source(source), 4, model=FakeModel(eos_bias=-50.0))
        out = generator.generate([[1], [2, 3]], with_mask(SamplingConfig(num_return_sequences=1), mask))
        assert out.finish_reasons == ["stop"] * 2 and [len(tokens) for tokens in out.generated_token_ids] == [2, 2]
        check_idle(generator)
    out = make_generator().generate([1], with_mask(SamplingConfig(num_beams=2, num_return_sequences=2), mask))
    assert out.finish_reasons == ["stop"] * 2 and all(len(tokens) == 2 for tokens in out.generated_token_ids)


class Failing(AllowedTokens):
    """Raises in one method, after some tokens."""

    def __init__(self, where: str) -> None:
        super().__init__(range(3, 40))
        self.where = where
        self.length = 0

    def _maybe(self, where: str, length: int) -> None:
        if where == self.where and length >= 3:
            raise RuntimeError(f"mine, in {where}")

    def fill(self, row: torch.Tensor) -> None:
        self._maybe("fill", self.length)
        super().fill(row)

    def accept(self, token: int) -> None:
        self._maybe("accept", self.length)
        super().accept(token)
        self.length += 1

    def rollback(self, num_tokens: int) -> None:
        self._maybe("rollback", self.length)
        self.length -= num_tokens

    def count_allowed(self, tokens: list[int]) -> int:
        self._maybe("count_allowed", self.length)
        return super().count_allowed(tokens)

    def forced(self) -> list[int]:
        self._maybe("forced", self.length)
        return []

    @property
    def is_finished(self) -> bool:
        self._maybe("is_finished", self.length)
        return False


@pytest.mark.parametrize("source", [None, "lookup", "perfect"])
@pytest.mark.parametrize("where", ["fill", "accept", "rollback", "count_allowed", "forced", "is_finished"])
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_a_mask_that_raises_fails_its_sequence_alone(source: str | None, where: str, name: str) -> None:
    if source is None and where in ("rollback", "count_allowed"):
        pytest.skip("not asked without drafts")
    model = FakeModel(eos_bias=-50.0)
    generator = make_generator(source and make_source(source), 4, model=model)
    others = [generator.add_request([token] * 8, with_mask(SamplingConfig(), None)) for token in (1, 2)]
    masked = generator.add_request([7] * 6, with_mask(SamplingConfig(), AllowedTokens(range(3, 40))))
    failing = generator.add_request([5] * 9, with_mask(CONFIGS[name], Failing(where)))
    with pytest.raises(RuntimeError, match=f"mine, in {where}"):
        failing.result()
    for request, token in zip(others, (1, 2)):
        assert request.result().generated_token_ids == [greedy(model, [token] * 8, 24)]
    assert set(masked.result().generated_token_ids[0]) <= set(range(3, 40))
    check_idle(generator)


class Nothing(AllowedTokens):
    """After two tokens allows no token, or tokens that do not exist. `words`: the mask's int32 words."""

    def __init__(self, words: list[int]) -> None:
        super().__init__([5, 6])
        self.words = words
        self.length = 0

    def accept(self, token: int) -> None:
        self.length += 1

    def rollback(self, num_tokens: int) -> None:
        self.length -= num_tokens

    def fill(self, row: torch.Tensor) -> None:
        super().fill(row)
        if self.length >= 2:
            row.copy_(torch.tensor(self.words, dtype=torch.int32))


@pytest.mark.parametrize("words", [[0, 0], [0, -(1 << 18)]], ids=["nothing", "tokens 50 to 63"])
@pytest.mark.parametrize("name", ["greedy", "sampled", "logprobs", "prompt logprobs", "beams"])
def test_a_mask_that_leaves_nothing_is_an_error_of_its_sequence(words: list[int], name: str) -> None:
    generator = make_generator(model=FakeModel(eos_bias=-50.0))
    other = generator.add_request([4], with_mask(SamplingConfig(), None))
    with pytest.raises(ValueError, match="no token is left to pick: the token_mask allows none"):
        generator.generate([1], with_mask(CONFIGS[name], Nothing(words)))
    assert other.result().generated_token_ids == [greedy(generator.driver.engine.model, [4], 24)]
    check_idle(generator)


def test_a_model_that_rules_out_what_the_mask_allows() -> None:
    model = FakeModel()
    honest = model.logits_of
    model.logits_of = lambda tokens: honest(tokens).index_fill(0, torch.tensor([5, 6]), -torch.inf)
    for config in (SamplingConfig(), SamplingConfig(do_sample=True, seed=1)):
        with pytest.raises(ValueError, match="none that the model does not rule out"):
            make_generator(model=model).generate([1], with_mask(config, AllowedTokens([5, 6])))


def test_drafts_beyond_a_row_that_fails_are_dropped() -> None:
    """An error while filling a mask after rejected drafts does not fail the request."""

    class Picky(FunctionMask):
        def fill(self, row: torch.Tensor) -> None:
            assert 48 not in self.tokens
            super().fill(row)

    model = FakeModel(eos_bias=-50.0)
    source = RandomDrafts()
    source.propose = lambda sequences, lengths, kv: [[48] * length for length in lengths]
    mask = Picky(lambda tokens: frozenset(range(VOCAB)) if tokens else frozenset(range(1, 48)))
    plain = make_generator(model=model).generate([1, 2], with_mask(SamplingConfig(), mask))
    assert 48 not in plain.generated_token_ids[0]
    out = make_generator(source, 3, model=model).generate([1, 2], with_mask(SamplingConfig(), mask))
    assert what_matters(out) == what_matters(plain) and out.metrics.num_drafted_tokens > 20


# -- the bundled model, row by row in Python
# -----------------------------------------------------------------------------


native = pytest.importorskip("pace.ops.native", reason="the kernels are not built")


def row_by_row(model: LLMModel, prompt: list[int], config: SamplingConfig, allowed, num_tokens: int):
    """Returns tokens and log-probabilities, computed one row at a time."""
    config = config.copy().merge_from(SamplingConfig())
    processors = Processors(build_processors(config, len(prompt), []))
    strategy = Sampling(processors, rules_of(config), config.seed or 0, config.logprobs)
    sequence = Sequence(prompt, strategy, None, 1000)
    with model.session() as session:
        logits = session.append(prompt)
        for _ in range(num_tokens):
            may_follow = allowed(tuple(sequence.generated))
            banned = torch.ones(logits.shape[1], dtype=torch.bool).index_fill_(0, torch.tensor([*may_follow]), False)
            logits[0, banned] = -torch.inf
            (token,) = strategy.choose(native, logits, Span(sequence, 0, 1))
            sequence.append(token)
            logits = session.append([token])
    return sequence.generated, sequence.logprobs


@pytest.mark.parametrize("name", ["greedy", "sampled", "cooler", "penalties", "logprobs", "sampled logprobs"])
def test_the_bundled_model(name: str) -> None:
    plain = bundled("plain")
    prompt = plain.tokenizer("Once upon a time, there was a")["input_ids"]
    allowed = random_allowed(3, plain.config.vocab_size, share_forced=0.4)
    tokens, logprobs = row_by_row(plain, prompt, CONFIGS[name], allowed, 16)
    for kind in ("plain", "lookup", "draft"):
        for forces in (False, True):
            config = with_mask(CONFIGS[name], FunctionMask(allowed, forces), 16)
            out = bundled(kind).generate([prompt], config.copy().merge_from(SamplingConfig(ignore_eos=True)))
            assert out.generated_token_ids == [tokens]
            assert out.logprobs == (None if CONFIGS[name].logprobs is None else [logprobs])


@pytest.mark.parametrize("kind", sample(["plain", "lookup", "draft"], lambda kind: kind == "draft"))
def test_the_bundled_model_with_few_and_many_tokens(kind: str) -> None:
    """Masked and unmasked rows in one batch, several samples of each."""
    plain = bundled("plain")
    prompts = ["Once upon a time", "1, 2, 3, 1, 2, 3,", "The capital of France is"]
    free = SamplingConfig(
        do_sample=True, seed=5, num_return_sequences=2, max_new_tokens=20, ignore_eos=True, logprobs=1
    )
    masked = free.copy().merge_from(SamplingConfig(token_mask=AllowedTokens(range(100, 1500))))
    expected = [what_matters(plain.generate(prompt, config)) for prompt in prompts for config in (free, masked)]
    results: dict[int, object] = {}

    def work(index: int) -> None:
        config = masked if index % 2 else free
        results[index] = what_matters(bundled(kind).generate(prompts[index // 2], config))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(6)] == expected
