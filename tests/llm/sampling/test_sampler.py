"""Sampling draws from the right distribution, depends only on the seed, and raises errors instead of wrong tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pace.llm.configs import SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.sampling.logits import Processors, RepetitionPenalty, build_processors
from pace.llm.sampling.sampler import (
    Sampler,
    Sampling,
    accept_drafts,
    draw,
    mix,
    rules_of,
    token_logprobs,
    uniform,
)
from pace.llm.sequence import Sequence, Span
from pace.ops.rules import Rules
from tests.llm.fake_model import OPS, FakeModel, FakeTokenizer


def make_generator() -> Generator:
    return Generator(Engine.create(FakeModel(), OPS, 1 << 22), FakeTokenizer(), SamplingConfig(eos_token_id=0))


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    count = 20_000
    drawn = (
        torch.bincount(torch.tensor([draw(probabilities, uniform(5, index)) for index in range(count)]), minlength=6)
        / count
    )
    # Four standard deviations of a frequency: 4 * sqrt(p (1 - p) / n) <= 4 * 0.5 / sqrt(20000) = 0.0142.
    assert (drawn - probabilities).abs().max() < 0.0142
    assert drawn[[0, 2, 5]].sum() == 0, "what was filtered out is never drawn"


@pytest.mark.parametrize("threshold, token", [(0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 4)])
def test_thresholds_at_the_edges(threshold: float, token: int) -> None:
    assert draw(torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0]), threshold) == token


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    for seed in (0, 1, 2**64 - 1):
        values = torch.tensor([uniform(seed, index) for index in range(10_000)], dtype=torch.float64)
        assert 0 <= values.min() and values.max() < 1
        assert abs(values.mean() - 0.5) < 4 * 0.2887 / 100, "four standard deviations of the mean"
        assert abs(torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1]) < 0.04
    firsts = torch.tensor([uniform(seed, 0) for seed in range(10_000)])
    assert abs(firsts.mean() - 0.5) < 4 * 0.2887 / 100, "neighbouring seeds are unrelated too"
    assert len({mix(value) for value in range(1000)}) == 1000


@pytest.mark.parametrize(
    "chosen, drafts, num_certain, accepted",
    [
        ([], [], 0, []),
        ([5], [], 0, [5]),
        ([5, 6, 7], [5, 6], 0, [5, 6, 7]),
        ([5, 6, 7], [5, 9], 0, [5, 6]),
        ([5, 6, 7], [1, 6], 0, [5]),
        ([5, 6], [5, 6], 0, [5, 6]),  # the row after the drafts is missing
        ([7], [5, 6], 2, [5, 6, 7]),
        ([], [5, 6], 2, [5, 6]),
        ([6, 7], [5, 6], 1, [5, 6, 7]),
        ([8, 7], [5, 6], 1, [5, 8]),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_differs(chosen, drafts, num_certain, accepted) -> None:
    span = Span(None, 0, 1, drafts, num_forced=num_certain, num_certain=num_certain)
    assert accept_drafts(chosen, span) == accepted and span.drafts == drafts


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_distribution_with_nothing_left_is_an_error(do_sample: bool) -> None:
    generator = make_generator()
    config = SamplingConfig(do_sample=do_sample, seed=0, logits_processors=[lambda ids, logits: logits * 0 - math.inf])
    with pytest.raises(ValueError, match="no token is left"):
        generator.generate([1, 2], config)
    generator.engine.check_idle()


def test_a_processor_that_raises_ends_its_call_alone() -> None:
    generator = make_generator()

    def fail(ids, logits):
        if ids.shape[1] > 6:
            raise RuntimeError("mine")
        return logits

    with pytest.raises(RuntimeError, match="mine"):
        generator.generate([1, 2], SamplingConfig(logits_processors=[fail], ignore_eos=True))
    generator.engine.check_idle()


def test_edits_that_raise_end_their_sequence_alone() -> None:
    class Failing(RepetitionPenalty):
        def edits(self):
            raise RuntimeError("mine")

    spans = [
        Span(Sequence([1, 2], Sampling(Processors([processor])), None, 9), 1, 1)
        for processor in (RepetitionPenalty(1.5), Failing(1.5), RepetitionPenalty(2.0))
    ]
    logits = torch.tensor([0.0, 4.0, 3.5, 3.0]).repeat(3, 1)
    assert Sampler(OPS, 4).sample(logits, spans) == [[3], [], [3]]
    assert [str(span.sequence.error) for span in spans] == ["None", "mine", "None"]


@pytest.mark.parametrize("asked, num_top", [(True, 0), (0, 0), (3, 3)])
def test_logprobs_are_of_the_models_own_distribution(asked, num_top: int) -> None:
    generator = make_generator()
    config = SamplingConfig(
        max_new_tokens=8,
        logprobs=asked,
        repetition_penalty=1.5,
        do_sample=True,
        temperature=0.5,
        seed=2,
        ignore_eos=True,
    )
    out = generator.generate([[4, 5], [6]], config)
    for prompt, tokens, records in zip([[4, 5], [6]], out.generated_token_ids, out.logprobs):
        assert [record.token for record in records] == tokens
        for index, record in enumerate(records):
            expected = generator.engine.model.logits_of(prompt + tokens[:index]).log_softmax(-1)
            assert record.logprob == pytest.approx(float(expected[tokens[index]]), abs=1e-5)
            values, ids = expected.topk(num_top)
            assert [token for token, _ in record.top] == ids.tolist()
            assert [value for _, value in record.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_are_absent_unless_asked_for() -> None:
    assert make_generator().generate([1], SamplingConfig(max_new_tokens=2)).logprobs is None
    assert make_generator().generate([1], SamplingConfig(max_new_tokens=2, logprobs=False)).logprobs is None


def test_greedy_with_logprobs_is_greedy() -> None:
    generator = make_generator()
    plain = generator.generate([1, 2], SamplingConfig(max_new_tokens=20))
    assert (
        generator.generate([1, 2], SamplingConfig(max_new_tokens=20, logprobs=2)).generated_token_ids
        == plain.generated_token_ids
    )


@pytest.mark.parametrize("num_logprobs", [0, 2])
@pytest.mark.parametrize("rules", [None, Rules(), Rules(top_k=5)])
def test_rows_of_nothing_but_bans_fail_alone(rules: Rules | None, num_logprobs: int) -> None:
    sequences = [Sequence([1, 2], Sampling(Processors([]), rules, 3, num_logprobs), None, 10) for _ in range(3)]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    logits[1] = -math.inf
    outcomes = Sampler(OPS, 50).sample(logits, [Span(sequence, 1, 1) for sequence in sequences])
    assert [len(tokens) for tokens in outcomes] == [1, 0, 1]
    assert "no token is left to pick" in str(sequences[1].error)
    assert sequences[0].error is None and sequences[2].error is None and not sequences[1].logprobs


SPARSE = {
    "repetition": dict(repetition_penalty=1.7), "openai": dict(frequency_penalty=0.7, presence_penalty=1.1),
    "ngrams": dict(no_repeat_ngram_size=2), "single": dict(no_repeat_ngram_size=1),
    "words": dict(bad_words_ids=[[3], [5, 7]], min_new_tokens=4),
    "all": dict(repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={2: 3.0, 9: -math.inf},
      no_repeat_ngram_size=3),
}  # fmt: skip


@pytest.mark.parametrize("num_logprobs", [None, 2])
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_k": 8, "temperature": 1.5}, {"do_sample": True}])
@pytest.mark.parametrize("name", SPARSE)
def test_edits_of_a_step_are_the_processors_one_by_one(name: str, sampled: dict, num_logprobs: int | None) -> None:
    """At each step, with accepted and rejected drafts, the sampler chooses the same tokens as the strategy itself. The
    strategy calls each processor on a single row."""
    config = SamplingConfig(**SPARSE[name], **sampled).merge_from(SamplingConfig())
    generator = torch.Generator().manual_seed(len(name))

    def make() -> Sequence:
        processors = Processors(build_processors(config, 3, [0, 4]))
        return Sequence([1, 2, 1], Sampling(processors, rules_of(config), 5, num_logprobs), None, 100)

    together, alone = make(), make()
    assert together.strategy.plan.edits is not None
    sampler, num_accepted = Sampler(OPS, 40), 0
    for step in range(12):
        logits = 2.0 * torch.randn(4, 40, generator=generator)
        first = make()
        first.tokens = list(together.tokens)
        drafts = first.strategy.choose(OPS, logits[:1].clone(), Span(first, len(first.tokens) - 1, 1))
        drafts += torch.randint(40, (step % 3,), generator=generator).tolist()
        spans = [Span(sequence, len(sequence.tokens) - 1, 1, list(drafts)) for sequence in (together, alone)]
        rows = logits[: len(drafts) + 1]
        (tokens,) = sampler.sample(rows.clone(), spans[:1])
        assert tokens == alone.strategy.choose(OPS, rows.clone(), spans[1]) and together.error is None
        num_accepted += len(tokens) - 1
        for sequence in (together, alone):
            sequence.tokens += tokens
        assert [one.token for one in together.logprobs] == ([] if num_logprobs is None else together.generated)
        for one, other in zip(together.logprobs, alone.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert num_accepted >= 12


def test_a_processor_that_changes_logits_in_its_own_way_is_called() -> None:
    class Louder(RepetitionPenalty):
        def apply(self, logits: torch.Tensor) -> None:
            logits[7] = 100.0

    for processors in ([Louder(2.0)], [RepetitionPenalty(2.0), Louder(2.0)]):
        strategy = Sampling(Processors(processors))
        assert strategy.plan is None
        (tokens,) = Sampler(OPS, 20).sample(torch.zeros(1, 20), [Span(Sequence([1], strategy, None, 9), 0, 1)])
        assert tokens == [7]


def test_what_the_processors_ban_is_never_picked() -> None:
    strategy = Sampling(Processors(build_processors(SamplingConfig(bad_words_ids=[[0], [1], [2]]), 1, [])))
    sequence = Sequence([1], strategy, None, 9)
    assert Sampler(OPS, 3).sample(torch.zeros(1, 3), [Span(sequence, 0, 1)]) == [[]]
    assert "no token is left to pick" in str(sequence.error)


def test_token_logprobs() -> None:
    logits, row, token = torch.tensor([[9.0, 0.0], [0.0, math.log(3.0)]]), torch.tensor([1]), torch.tensor([0])
    (record,) = token_logprobs(OPS, logits, row, token, 1)
    assert record.logprob == pytest.approx(math.log(0.25)) and record.top == ((1, pytest.approx(math.log(0.75))),)


class LargeOperations(TorchDispatchMode):
    """Records the names of torch operations on more numbers than torch gives one thread (32,768), except views and
    lookups."""

    LOOKUPS = {
        "index", "index_put_", "index_select", "gather", "scatter_", "select", "slice", "unsqueeze", "view", "alias",
        "detach", "empty", "lift_fresh",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in self.LOOKUPS and any(isinstance(arg, torch.Tensor) and arg.numel() > 32768 for arg in args):
            self.names.add(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "fields",
    [{}, {"repetition_penalty": 1.2}, {"do_sample": True},
     {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"do_sample": True, "min_p": 0.1}],
    ids=str,
)  # fmt: skip
def test_no_thread_of_torch_is_woken_for_a_token(fields: dict) -> None:
    native = pytest.importorskip("pace.ops.native")
    config = SamplingConfig(**fields).merge_from(SamplingConfig())
    strategy = Sampling(Processors(build_processors(config, 3, [])), rules_of(config), 5) if fields else Sampling()
    sequence = Sequence([1, 2, 3], strategy, None, 10)
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    with LargeOperations() as seen:
        (tokens,) = Sampler(native, 50_000).sample(logits, [Span(sequence, 0, 3)])
    assert len(tokens) == 1 and sequence.error is None and seen.names == set()
    with LargeOperations() as seen:
        logits.clone()
    assert seen.names == {"clone"}
