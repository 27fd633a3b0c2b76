"""Masks that end, raise, or leave nothing: what becomes of their sequences and of others."""

from __future__ import annotations

import pytest
import torch

from pace.llm.configs import SamplingConfig
from pace.llm.decoding.masks import AllowedTokens
from tests.llm.decoding.masks import VOCAB, Automaton, FunctionMask, with_mask
from tests.llm.decoding.test_masks import CONFIGS, SOURCES
from tests.llm.fake_model import FakeModel, greedy
from tests.llm.generators import check_idle, what_matters
from tests.llm.speculation.drafters import RandomDrafts, make_generator, make_source


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
    """Raises at one method, after some tokens."""

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
    """Allows nothing after two tokens, or what does not exist."""

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
    """A mask that cannot be filled after drafts which do not come true fails nothing."""

    class Picky(FunctionMask):
        def fill(self, row: torch.Tensor) -> None:
            assert 48 not in self.tokens
            super().fill(row)

    model = FakeModel(eos_bias=-50.0)
    source = RandomDrafts()
    source.propose = lambda sequences, lengths: [[48] * length for length in lengths]
    mask = Picky(lambda tokens: frozenset(range(VOCAB)) if tokens else frozenset(range(1, 48)))
    plain = make_generator(model=model).generate([1, 2], with_mask(SamplingConfig(), mask))
    assert 48 not in plain.generated_token_ids[0]
    out = make_generator(source, 3, model=model).generate([1, 2], with_mask(SamplingConfig(), mask))
    assert what_matters(out) == what_matters(plain) and out.metrics.num_drafted_tokens > 20
