"""Chi-square test of sampling with drafts against exact probabilities, and a check that it detects a planted bias."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import pytest
import torch

from pace.llm.configs import SamplingConfig
from pace.llm.sampling import sampler
from tests.llm.fake_model import FakeModel
from tests.llm.speculation.drafters import make_generator, make_source

VOCAB, SAMPLES, NUM_TOKENS = 5, 1000, 3
CALLS = 20
PROMPT = [1, 2, 3]
CONFIG = SamplingConfig(do_sample=True, temperature=1.7, top_k=4, max_new_tokens=NUM_TOKENS, ignore_eos=True)
CONFIG.num_return_sequences = SAMPLES // CALLS


def exact(model: FakeModel) -> dict[tuple[int, ...], float]:
    """Returns the probability of every continuation of `NUM_TOKENS` tokens."""

    def next_token(tokens: list[int]) -> torch.Tensor:
        logits = model.logits_of(tokens).double() / 1.7
        logits[logits < logits.topk(4).values[-1]] = -torch.inf
        return logits.softmax(0)

    result = {}
    for tokens in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        probability = 1.0
        for index, token in enumerate(tokens):
            probability *= float(next_token([*PROMPT, *tokens[:index]])[token])
        result[tokens] = probability
    return result


def chi_square(counts: Counter, expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """Returns the statistic and its degrees of freedom. Outcomes expected less than 8 times are counted together."""
    assert sum(counts.values()) == SAMPLES and not [tokens for tokens in counts if expected[tokens] == 0]
    cells = [(counts[tokens], SAMPLES * p) for tokens, p in expected.items() if SAMPLES * p >= 8]
    rest = SAMPLES - sum(seen for seen, _ in cells), SAMPLES - sum(wanted for _, wanted in cells)
    cells += [rest] if rest[1] >= 8 else []
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), len(cells) - 1


def remembering(logits_of):
    remembered = functools.cache(lambda *tokens: logits_of(list(tokens)))
    return lambda tokens: remembered(*tokens).clone()


def sampled(name: str) -> tuple[Counter, float]:
    source, model = make_source(name, vocab_size=VOCAB, num_blocks=200), FakeModel(VOCAB)
    for each in (source.model, model):
        each.logits_of = remembering(each.logits_of)
    generator = make_generator(source, 2, model=model, num_blocks=400)
    counts: Counter[tuple[int, ...]] = Counter()
    num_drafted = num_accepted = 0
    for seed in range(CALLS):
        config = CONFIG.copy()
        config.seed = seed
        out = generator.generate(PROMPT, config)
        counts.update(map(tuple, out.generated_token_ids))
        num_drafted += out.metrics.num_drafted_tokens
        num_accepted += out.metrics.num_accepted_tokens
    return counts, num_accepted / num_drafted


@pytest.mark.parametrize("name", ["half", pytest.param("perfect", marks=pytest.mark.thorough)])
def test_sampled_texts_have_the_probabilities_of_the_model(name: str) -> None:
    """Under the hypothesis the statistic exceeds its mean (the degrees of freedom) by 4 standard deviations once in
    10,000 runs. The seed is fixed."""
    counts, acceptance = sampled(name)
    statistic, freedom = chi_square(counts, exact(FakeModel(VOCAB)))
    assert freedom > 20 and statistic < freedom + 4 * (2 * freedom) ** 0.5
    assert acceptance == 1.0 if name == "perfect" else 0.2 < acceptance < 0.9


@pytest.mark.thorough
def test_a_bias_is_noticed(monkeypatch) -> None:
    """The planted bias replaces the last token of the vocabulary by the one before it, after the first few tokens."""
    honest = sampler.accept_drafts

    def biased(own, span):
        length = len(span.sequence.tokens)
        own = [min(token, VOCAB - 2) if length + row > len(PROMPT) + 1 else token for row, token in enumerate(own)]
        return honest(own, span)

    monkeypatch.setattr(sampler, "accept_drafts", biased)
    counts, _ = sampled("half")
    expected = exact(FakeModel(VOCAB))
    if all(expected[tokens] for tokens in counts):  # otherwise impossible texts were generated
        statistic, freedom = chi_square(counts, expected)
        assert statistic > freedom + 8 * (2 * freedom) ** 0.5
