"""`pick` compared with guidance's own choice of a token, on random logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from guidance._utils import softmax
from guidance.models._engine import Engine
from guidance.models._engine._engine import apply_temp_and_sampling_params

from pace.integrations.guidance.sampling import Sampling, _shaped, pick

SIZE = 333
SEEN = [3, 5, 5, 9, 200]
PARAMS = [
    {}, {"top_k": 10}, {"top_p": 0.7}, {"min_p": 0.1}, {"repetition_penalty": 1.7},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2}, {"top_p": 0.9, "min_p": 0.3},
    {"top_p": None, "top_k": -1},
]  # fmt: skip


class TheirEngine(Engine):
    """The base class of guidance's own engines, with given logits."""

    def __init__(self):
        pass

    class tokenizer:
        decode = staticmethod(lambda tokens: b"%d" % tokens[0])

    def get_logits(self, *arguments):
        raise NotImplementedError


def logits_and_mask(seed):
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal(SIZE)).astype(np.float32)
    return logits, (rng.random(SIZE) < 0.4).astype(np.uint8).tobytes()


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("masked", [False, True])
def test_the_distribution_is_guidances(params, temperature, masked):
    for seed in range(5):
        logits, mask = logits_and_mask(seed)
        mask = mask if masked else None
        allowed = logits if mask is None else np.where(np.frombuffer(mask, np.uint8) != 0, logits, -np.inf)
        theirs = softmax(apply_temp_and_sampling_params(allowed.copy(), SEEN, temperature, params))
        given = torch.from_numpy(logits)[None]
        ours = softmax(_shaped(given, mask, SEEN, temperature, Sampling.read(params)).numpy()[0])
        assert np.array_equal(ours > 0, theirs > 0)
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_the_likeliest_and_their_probabilities_are_guidances(params, masked):
    for seed in range(5):
        logits, mask = logits_and_mask(seed)
        mask = mask if masked else None
        theirs = TheirEngine().get_next_token_with_top_k(logits.copy(), 0.0, SEEN, mask, 0.0, 5, True, params)
        ours = pick(logits, mask, SEEN, 0.0, Sampling.read(params), 5)
        assert ours.token == theirs.token_id and ours.prob == pytest.approx(theirs.prob, rel=1e-5)
        assert [token for token, _ in ours.likeliest] == [one.token_id for one in theirs.top_k[:5]]
        assert [prob for _, prob in ours.likeliest] == pytest.approx([one.prob for one in theirs.top_k[:5]], rel=1e-5)


def test_draws_are_of_the_distribution():
    logits, mask = logits_and_mask(1)
    sampling = Sampling.read({"top_k": 4})
    drawn = [pick(logits, mask, [*range(n)], 1.0, Sampling(top_k=4, seed=8), None).token for n in range(4000)]
    allowed = np.where(np.frombuffer(mask, np.uint8) != 0, logits, -np.inf)
    probs = softmax(apply_temp_and_sampling_params(allowed, SEEN, 1.0, {"top_k": sampling.top_k}))
    counts = np.bincount(drawn, minlength=SIZE)
    expected = 4000 * probs
    assert counts[probs == 0].sum() == 0 and np.count_nonzero(probs) == 4
    assert np.all(np.abs(counts - expected) <= 5 * np.sqrt(expected + 1))


def test_seeds_and_numpys_generator():
    logits, _ = logits_and_mask(2)

    def drawn(seed):
        return [pick(logits, None, [0] * n, 1.0, Sampling(seed=seed), None).token for n in range(30)]

    assert drawn(1) == drawn(1) != drawn(2)
    np.random.seed(4)
    first = drawn(None)
    np.random.seed(4)
    assert drawn(None) == first != drawn(None)


def test_logits_are_left_alone_and_probabilities_unasked_are_nan():
    logits, mask = logits_and_mask(3)
    before = logits.copy()
    picked = pick(logits, mask, SEEN, 0.7, Sampling(top_k=3, repetition_penalty=2.0), None)
    assert np.array_equal(logits, before) and math.isnan(picked.prob) and picked.likeliest == []
    assert mask[picked.token]


def test_nothing_left():
    with pytest.raises(ValueError, match="no token is left"):
        pick(np.zeros(SIZE, np.float32), bytes(SIZE), SEEN, 0.0, Sampling(), None)


@pytest.mark.parametrize(
    "params",
    [{"top_p": 1.5}, {"top_k": 1.5}, {"min_p": -0.1}, {"repetition_penalty": "2"}, {"seed": -1}, {"top_k": True}],
)
def test_values_that_cannot_be(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        Sampling.read(params)


def test_names_that_are_none():
    with pytest.raises(TypeError, match="temprature"):
        Sampling.read({"temprature": 1.0})
