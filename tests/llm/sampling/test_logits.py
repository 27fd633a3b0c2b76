"""Compares every processor and filter with its transformers counterpart, on random logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from pace.llm.configs import SamplingConfig
from pace.llm.sampling.filters import make_filter
from pace.llm.sampling.logits import (
    FrequencyPresencePenalty,
    LogitsProcessor,
    NoRepeatNgram,
    Processors,
    RepetitionPenalty,
    build_processors,
)

VOCAB = 40
END = [3, 7]


def random_case(seed: int, longest: int = 30) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, longest, (), generator=generator))
    tokens = torch.randint(0, 6 if seed % 2 else VOCAB, (length,), generator=generator).tolist()
    return tokens, torch.randn(VOCAB, generator=generator) * 4


def ours(config: SamplingConfig, tokens: list[int], logits: torch.Tensor, num_prompt_tokens: int) -> torch.Tensor:
    logits = logits.clone()
    processors = Processors(build_processors(config, num_prompt_tokens, END))
    processors.follow(tokens)
    processors.apply_(logits)
    if filter_ := make_filter(config):
        filter_(logits)
    return logits


def theirs(processors: list, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    return hf.LogitsProcessorList(processors)(torch.tensor([tokens]), logits[None].clone())[0]


PROCESSORS = {
    "repetition": (dict(repetition_penalty=1.3), lambda n: [hf.RepetitionPenaltyLogitsProcessor(1.3)]),
    "repetition reward": (dict(repetition_penalty=0.6), lambda n: [hf.RepetitionPenaltyLogitsProcessor(0.6)]),
    "ngram 1": (dict(no_repeat_ngram_size=1), lambda n: [hf.NoRepeatNGramLogitsProcessor(1)]),
    "ngram 2": (dict(no_repeat_ngram_size=2), lambda n: [hf.NoRepeatNGramLogitsProcessor(2)]),
    "ngram 3": (dict(no_repeat_ngram_size=3), lambda n: [hf.NoRepeatNGramLogitsProcessor(3)]),
    "bias": (dict(logit_bias={1: 2.5, 9: -3.0}), lambda n: [hf.SequenceBiasLogitsProcessor([[[1], 2.5], [[9], -3.0]])]),
    "bad words": (
        dict(bad_words_ids=[[2], [1, 4], [0, 0, 5], [3]]),
        lambda n: [hf.NoBadWordsLogitsProcessor([[2], [1, 4], [0, 0, 5], [3]], END)],
    ),
    "suppressed": (dict(suppress_tokens=[2, 5, *END]), lambda n: [hf.SuppressTokensLogitsProcessor([2, 5, *END])]),
    "min new": (dict(min_new_tokens=4), lambda n: [hf.MinNewTokensLengthLogitsProcessor(n, 4, END)]),
    "all in order": (
        dict(
            logit_bias={4: 1.5},
            repetition_penalty=1.2,
            no_repeat_ngram_size=2,
            bad_words_ids=[[5, 1]],
            min_new_tokens=3,
        ),
        lambda n: [
            hf.SequenceBiasLogitsProcessor([[[4], 1.5]]),
            hf.RepetitionPenaltyLogitsProcessor(1.2),
            hf.NoRepeatNGramLogitsProcessor(2),
            hf.NoBadWordsLogitsProcessor([[5, 1]], END),
            hf.MinNewTokensLengthLogitsProcessor(n, 3, END),
        ],
    ),
}
FILTERS = {
    "temperature": (dict(temperature=0.7, top_k=0), [hf.TemperatureLogitsWarper(0.7)]),
    "top_k": (dict(top_k=5), [hf.TopKLogitsWarper(5)]), "top_k beyond": (dict(top_k=1000), [hf.TopKLogitsWarper(1000)]),
    "top_p": (dict(top_k=0, top_p=0.8), [hf.TopPLogitsWarper(0.8)]),
    "top_p tiny": (dict(top_k=0, top_p=0.01), [hf.TopPLogitsWarper(0.01)]),
    "min_p": (dict(top_k=0, min_p=0.1), [hf.MinPLogitsWarper(0.1)]),
    "typical": (dict(top_k=0, typical_p=0.7), [hf.TypicalLogitsWarper(0.7)]),
    "all in order": (dict(temperature=1.7, top_k=20, top_p=0.9, min_p=0.02, typical_p=0.8),
      [hf.TemperatureLogitsWarper(1.7), hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.9),
      hf.MinPLogitsWarper(0.02), hf.TypicalLogitsWarper(0.8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_are_those_of_transformers(name: str) -> None:
    fields, make = PROCESSORS[name]
    changed = 0
    for seed in range(60):
        tokens, logits = random_case(seed)
        num_prompt_tokens = len(tokens) // 2
        result = ours(SamplingConfig(**fields), tokens, logits, num_prompt_tokens)
        torch.testing.assert_close(result, theirs(make(num_prompt_tokens), tokens, logits))
        changed += not torch.equal(result, logits)
    assert changed > 5, "the cases exercise the processor"


@pytest.mark.parametrize("name", FILTERS)
def test_filters_are_those_of_transformers(name: str) -> None:
    fields, warpers = FILTERS[name]
    for seed in range(60):
        tokens, logits = random_case(seed)
        result = ours(SamplingConfig(do_sample=True, **fields), tokens, logits, len(tokens))
        expected = theirs(warpers, tokens, logits)
        assert torch.equal(result == -math.inf, expected == -math.inf), "the same tokens are left"
        torch.testing.assert_close(result, expected)


def test_top_k_keeps_what_equals_the_last() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    left = ours(SamplingConfig(do_sample=True, top_k=2), [0], logits, 1) > -math.inf
    assert left.tolist() == [False, True, True, True, False]


def test_greedy_has_no_filters() -> None:
    assert make_filter(SamplingConfig(temperature=0.3, top_k=3)) is None
    assert build_processors(SamplingConfig(do_sample=True, seed=1), 3, END) == []


def test_openai_penalties_count_generated_tokens_only() -> None:
    prompt, generated = [1, 1, 1, 2], [5, 6, 5, 5]
    result = ours(
        SamplingConfig(frequency_penalty=0.5, presence_penalty=0.25),
        prompt + generated,
        torch.zeros(VOCAB),
        len(prompt),
    )
    expected = torch.zeros(VOCAB)
    expected[5], expected[6] = -3 * 0.5 - 0.25, -0.5 - 0.25
    assert torch.equal(result, expected)


def test_minus_infinity_bans() -> None:
    result = ours(SamplingConfig(logit_bias={2: -math.inf}), [1], torch.zeros(VOCAB), 1)
    assert result[2] == -math.inf and torch.isfinite(result).sum() == VOCAB - 1


def test_a_callable_is_called_as_transformers_calls_its_own() -> None:
    processor = hf.RepetitionPenaltyLogitsProcessor(1.5)
    tokens, logits = random_case(4)
    result = ours(SamplingConfig(logits_processors=[processor]), tokens, logits, 2)
    torch.testing.assert_close(result, theirs([processor], tokens, logits))


@pytest.mark.parametrize("returned", [None, torch.zeros(3), 5])
def test_a_callable_that_returns_no_logits_is_told(returned) -> None:
    with pytest.raises(TypeError, match="must return logits"):
        ours(SamplingConfig(logits_processors=[lambda ids, logits: returned]), [1], torch.zeros(VOCAB), 1)


class Counting(LogitsProcessor):
    """A tiny grammar: the only allowed token is the number of tokens seen."""

    def __init__(self) -> None:
        self.count = 0

    def accept(self, token: int) -> None:
        self.count += 1

    def rollback(self, num_tokens: int) -> None:
        self.count -= num_tokens

    def apply(self, logits: torch.Tensor) -> None:
        allowed = logits[self.count % VOCAB].clone()
        logits.fill_(-math.inf)
        logits[self.count % VOCAB] = allowed


def test_our_own_processors_are_forked_for_each_sequence() -> None:
    original = Counting()
    for _ in range(2):
        assert int(ours(SamplingConfig(logits_processors=[original]), [9, 9, 9], torch.zeros(VOCAB), 3).argmax()) == 3
    assert original.count == 0 and original.seen == []


class FirstOfPrompt(LogitsProcessor):
    """Allows the first token of the prompt, then the first generated one."""

    def apply(self, logits: torch.Tensor) -> None:
        logits += 1000 * torch.nn.functional.one_hot(
            torch.tensor(self.seen[0 if len(self.seen) <= self.num_prompt_tokens else self.num_prompt_tokens]), VOCAB
        )


def test_a_processor_knows_where_the_prompt_ends() -> None:
    config = SamplingConfig(logits_processors=[FirstOfPrompt()])
    assert int(ours(config, [9, 8, 7], torch.zeros(VOCAB), 3).argmax()) == 9
    assert int(ours(config, [9, 8, 7, 6, 5], torch.zeros(VOCAB), 3).argmax()) == 6


class Returning(LogitsProcessor):
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + 1


def test_logits_that_apply_returns_would_be_lost() -> None:
    with pytest.raises(TypeError, match=r"Returning.apply must change the logits in place .* got Tensor"):
        ours(SamplingConfig(logits_processors=[Returning()]), [1], torch.zeros(VOCAB), 1)
    Returning.apply = lambda self, logits: logits.add_(1)
    assert torch.equal(
        ours(SamplingConfig(logits_processors=[Returning()]), [1], torch.zeros(VOCAB), 1), torch.ones(VOCAB)
    ), "in place, and told"
    with pytest.raises(NotImplementedError, match="must define apply"):
        ours(SamplingConfig(logits_processors=[LogitsProcessor()]), [1], torch.zeros(VOCAB), 1)


class Stacking(LogitsProcessor):
    """Keeps state in every container that a fork has to copy, also one level deeper."""

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.latest: dict[str, int] = {}
        self.distinct: set[int] = set()

    def accept(self, token: int) -> None:
        self.stack.append(token)
        self.latest["last"] = token
        self.distinct.add(token)

    def apply(self, logits: torch.Tensor) -> None:
        logits[sorted(self.distinct)] += 1.0
        logits[self.latest["last"]] += len(self.stack)


@pytest.mark.parametrize(
    "make", [Stacking, Counting, lambda: RepetitionPenalty(2.0), lambda: NoRepeatNgram(2), lambda: NoRepeatNgram(1)]
)
def test_forks_go_their_own_ways(make) -> None:
    def alone(tokens: list[int]) -> torch.Tensor:
        logits = torch.ones(VOCAB)
        make()(torch.tensor([tokens]), logits[None])
        return logits

    def after(processors: Processors) -> torch.Tensor:
        logits = torch.ones(VOCAB)
        processors.apply_(logits)
        return logits

    first = Processors([make()])
    first.follow([1, 2, 1])
    second, third = first.fork(), first.fork()
    first.follow([1, 2, 1, 5, 1])
    second.follow([1, 2, 1, 6])
    fourth = second.fork()
    fourth.accept(2)
    assert torch.equal(after(first), alone([1, 2, 1, 5, 1])) and torch.equal(after(second), alone([1, 2, 1, 6]))
    assert torch.equal(after(third), alone([1, 2, 1])) and torch.equal(after(fourth), alone([1, 2, 1, 6, 2]))


class Telling(LogitsProcessor):
    """Records the calls of its methods."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def accept(self, token: int) -> None:
        self.told.append(token)
        assert len(self.seen) == sum(isinstance(entry, int) for entry in self.told[:-1]), "those before the call"

    def rollback(self, num_tokens: int) -> None:
        self.told.append(self.seen[-num_tokens:])

    def apply(self, logits: torch.Tensor) -> None: ...


def test_a_token_is_told_once_and_taken_back_where_a_step_is_done_again() -> None:
    telling = Telling()
    processors = Processors([RepetitionPenalty(2.0), telling])
    tokens = [4, 5]
    processors.follow(tokens)
    processors.follow(tokens)
    tokens.append(6)
    processors.follow(tokens)
    processors.accept(7)
    processors.accept(8)
    assert telling.told == [4, 5, 6, 7, 8] == telling.seen
    processors.follow(tokens)
    assert telling.told == [4, 5, 6, 7, 8, [7, 8]] and telling.seen == tokens


def test_a_processor_used_before_starts_afresh() -> None:
    used = Counting()
    used.sync([1, 2, 3])
    assert int(ours(SamplingConfig(logits_processors=[used]), [9, 9], torch.zeros(VOCAB), 1).argmax()) == 2
    assert used.count == 3


def test_what_is_no_processor_is_told() -> None:
    class Duck:
        def apply(self, logits: torch.Tensor) -> None: ...

    for wrong in (Duck(), [Duck()], 5):
        with pytest.raises(TypeError, match="pace.llm.LogitsProcessor, or of callables"):
            SamplingConfig(logits_processors=wrong)


def test_transformers_and_ours_stand_in_one_list_and_in_theirs() -> None:
    tokens, logits = random_case(6)
    theirs_list = hf.LogitsProcessorList(
        [hf.NoRepeatNGramLogitsProcessor(2), hf.MinNewTokensLengthLogitsProcessor(2, 9, END)]
    )
    expected = theirs([*theirs_list, hf.RepetitionPenaltyLogitsProcessor(1.4)], tokens, logits)
    torch.testing.assert_close(
        ours(SamplingConfig(logits_processors=theirs_list), tokens, logits, 2), theirs(theirs_list, tokens, logits)
    )
    torch.testing.assert_close(
        ours(SamplingConfig(logits_processors=[*theirs_list, RepetitionPenalty(1.4)]), tokens, logits, 2), expected
    )
    torch.testing.assert_close(theirs([*theirs_list, RepetitionPenalty(1.4)], tokens, logits), expected)


stateful = [
    lambda: RepetitionPenalty(1.7), lambda: FrequencyPresencePenalty(0.3, 0.2, 4), lambda: NoRepeatNgram(1),
    lambda: NoRepeatNgram(2), lambda: NoRepeatNgram(4), Counting,
]  # fmt: skip


@pytest.mark.parametrize("make", stateful)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.lists(st.integers(0, 4), max_size=8),
    st.lists(st.integers(0, 4), max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_rolled_back_is_as_if_it_had_not_been(make, kept: list[int], dropped: list[int], after: list[int]) -> None:
    once, fresh = make(), make()
    once.sync(kept + dropped)
    once = once.fork()
    once.sync(kept + after)
    fresh.sync(kept + after)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(kept)))
    results = [logits.clone(), logits.clone()]
    once.apply(results[0])
    fresh.apply(results[1])
    assert once.seen == fresh.seen == kept + after
    torch.testing.assert_close(results[0], results[1])
