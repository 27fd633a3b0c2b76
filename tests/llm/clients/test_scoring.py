"""Scores of given tokens: from any position on, with a reused prefix, and in any batch."""

from __future__ import annotations

import pytest
import torch

from pace.llm import LLMModel
from tests.llm.bundled import bundled

ROW = list(range(40, 90))


@pytest.fixture(scope="module")
def model() -> LLMModel:
    return bundled()


def test_scores_from_a_place_are_the_rest_of_all_scores(model) -> None:
    (whole,) = model.score([ROW])
    starts = [1, 2, 17, 33, 49, 50]
    for start, scores in zip(starts, model.score_from([ROW] * len(starts), starts)):
        assert torch.equal(scores.logprobs, whole[start - 1 :])
        assert len(scores.are_likeliest) == len(ROW) - start


def test_the_likeliest_tokens_are_told(model) -> None:
    with model.session() as session:
        likeliest = session.append(ROW[:-1], logits="all").argmax(-1)
    row = [*ROW[:20], int(likeliest[19]), *ROW[21:]]
    (scores,) = model.score_from([row], [20])
    assert bool(scores.are_likeliest[0])
    with model.session() as session:
        expected = session.append(row[:-1], logits="all").argmax(-1)[19:] == torch.tensor(row[20:])
    assert torch.equal(scores.are_likeliest, expected) and not expected.all()


def test_a_beginning_that_is_known_is_not_computed_again(model, monkeypatch) -> None:
    runner, computed = model._engine.model, []
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch: computed.append(len(batch.tokens)) or forward(batch))
    beginning = list(range(100, 180))
    model.score_from([[*beginning, 5]], [80])
    model.score_from([[*beginning, 6], [*beginning, 7]], [80, 80])
    assert sum(computed[1:]) < len(beginning)


@pytest.mark.parametrize(
    ("starts", "message"), [([0], "must be 1 or more.*got 0"), ([-1], "must be 1 or more.*got -1"), ([], "shorter")]
)
def test_places_that_cannot_be(model, starts, message) -> None:
    with pytest.raises(ValueError, match=message):
        model.score_from([ROW], starts)
