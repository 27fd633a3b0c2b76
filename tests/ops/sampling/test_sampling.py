"""Operations for sampling: argmax, softmax, top-k and top-p, against torch and against transformers' warpers."""

from __future__ import annotations

import math

import pytest
import torch

from pace.ops import native, reference
from tests.ops.isas import FLOATS, each_isa, on_each_isa

VOCABULARIES = [1, 2, 15, 16, 17, 63, 100, 1000, 5000]


def random_logits(rows: int, n: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))


def vectors(rows: int, k: int, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((rows,), k), torch.full((rows,), p)


@on_each_isa
def test_argmax_is_the_lowest_index_of_the_largest():
    for n in VOCABULARIES:
        logits = random_logits(8, n).round()  # many ties
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert native.argmax(logits).tolist() == expected
        assert native.argmax(torch.full((1, n), -math.inf)).tolist() == [-1]
        for place in {0, n // 2, n - 1}:
            spiked = logits.clone()
            spiked[:, place] = torch.finfo(torch.float32).max
            assert native.argmax(spiked).tolist() == [place] * 8
            spiked[3, place], spiked[5, place] = math.nan, math.inf
            assert native.argmax(spiked).tolist() == [place] * 3 + [-1, place, -1] + [place] * 2


@pytest.mark.parametrize("n", VOCABULARIES)
@on_each_isa
def test_softmax_and_log_softmax(n):
    logits = random_logits(4, n, scale=10.0)
    logits[1, : n - 1] = -math.inf
    logits[2] += 1e4
    exact = logits.double().log_softmax(-1)
    eps = 2.0**-24
    # exp has an error of 2 ulp, and its argument is rounded once (|x - max| eps). The sum of n terms adds a few ulp per
    # piece of 4096.
    relative = (
        20 + (logits.double() - logits.double().amax(-1, keepdim=True)).abs().nan_to_num(posinf=0.0) + min(n, 4096) / 64
    ) * eps
    probability = native.softmax(logits)
    assert ((probability - exact.exp()).abs() <= relative * exact.exp() + 1e-37).all()
    logarithm = native.log_softmax(logits)
    finite = exact.isfinite()
    assert torch.equal(logarithm.isfinite(), finite)
    assert ((logarithm - exact)[finite].abs() <= (relative + 4 * eps * exact.abs())[finite]).all()


@on_each_isa
def test_rows_may_be_strided():
    wide = random_logits(3, 50)
    view = wide[:, 5:40]
    assert torch.equal(native.softmax(view), native.softmax(view.contiguous()))
    before = wide.clone()
    native.top_k_top_p_(view, *vectors(3, 4, 1.0))
    assert torch.equal(wide[:, :5], before[:, :5]) and torch.equal(wide[:, 40:], before[:, 40:])
    assert (wide[:, 5:40] > -math.inf).sum(-1).tolist() == [4, 4, 4]


@pytest.mark.parametrize("order", ["random", "rising", "falling", "ties", "equal"])
def test_top_k_keeps_what_equals_the_last(order):
    for k in (1, 2, 7, 50, 4999, 5000, 6000, 0):
        logits = random_logits(3, 5000, seed=k)
        if order == "rising":
            logits = logits.sort(-1).values
        elif order == "falling":
            logits = logits.sort(-1, descending=True).values
        elif order == "ties":
            logits = logits.round()
        elif order == "equal":
            logits = torch.ones(3, 5000)
        expected = logits.clone()
        reference.top_k_top_p_(expected, *vectors(3, k, 1.0))
        for isa in each_isa():
            got = logits.clone()
            native.top_k_top_p_(got, *vectors(3, k, 1.0))
            assert torch.equal(got, expected), (k, isa)


@pytest.mark.parametrize("k", [0, 40])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@on_each_isa
def test_top_p_is_the_smallest_prefix_of_that_mass(k, scale):
    logits = random_logits(4, 3000, seed=7, scale=scale)
    for p in (0.0, 0.1, 0.5, 0.9, 0.99, 0.9999):
        got = logits.clone()
        native.top_k_top_p_(got, *vectors(4, k, p))
        p = float(torch.tensor(p))  # the value that the kernel gets
        for row, filtered in zip(logits.double(), got):
            values, order = row.sort(descending=True, stable=True)
            if k:
                values, order = values[:k], order[:k]
            mass_before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
            kept = int((filtered > -math.inf).sum())
            assert kept >= 1, p
            assert set(order[:kept].tolist()) == set(filtered.isfinite().nonzero().flatten().tolist()), p
            # The mass before the last kept token is below p, up to the rounding of the fp32 sum of all weights.
            assert kept == 1 or mass_before[kept - 1] < p + 1e-6, p
            assert kept == len(values) or mass_before[kept] >= p - 1e-6, p


@on_each_isa
def test_a_mass_that_is_met_exactly_needs_no_further_word():
    """Eight tokens of an eighth each: all sums are exact."""
    for p, kept in ((0.5, 4), (0.501, 5), (0.125, 1), (0.875, 7)):
        for ops in (native, reference):
            logits = torch.zeros(3, 8)
            ops.top_k_top_p_(logits, *vectors(3, 0, p))
            assert (logits == 0).sum(1).tolist() == [kept] * 3, (p, ops)


@on_each_isa
def test_equals_the_warpers_of_transformers():
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = random_logits(16, 2000, seed=3)
    ids = torch.zeros(16, 1, dtype=torch.long)
    for k, p in [(50, 1.0), (0, 0.8), (50, 0.8), (1, 0.5), (3, 0.01)]:
        expected = logits.clone()
        if k:
            expected = process.TopKLogitsWarper(k)(ids, expected)
        if p < 1:
            expected = process.TopPLogitsWarper(p)(ids, expected)
        got = logits.clone()
        native.top_k_top_p_(got, *vectors(16, k, p))
        assert torch.equal(got, expected), (k, p)


@on_each_isa
def test_rows_have_their_own_limits_and_odd_rows_survive():
    logits = random_logits(5, 300)
    logits[3, 7] = math.nan
    logits[4, 9] = math.inf
    logits[2, 10:] = -math.inf
    got = logits.clone()
    native.top_k_top_p_(got, torch.tensor([0, 3, 20, 5, 0]), torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5]))
    assert torch.equal(got[0], logits[0])
    assert got[1].isfinite().sum() == 3
    assert torch.equal(got[2], logits[2])  # fewer finite tokens than k
    assert torch.equal(got[3].nan_to_num(0.5), logits[3].nan_to_num(0.5))
    assert torch.equal(got[4], logits[4])


def test_a_large_vocabulary():
    logits = random_logits(2, 152_000, seed=11)
    expected = logits.clone()
    reference.top_k_top_p_(expected, *vectors(2, 40, 1.0))
    for isa in each_isa([isa for isa in FLOATS if "emulated" not in isa]):  # emulated tables are slow
        got = logits.clone()
        native.top_k_top_p_(got, *vectors(2, 40, 1.0))
        assert torch.equal(got, expected), isa
        assert native.argmax(logits).tolist() == logits.argmax(-1).tolist(), isa


def test_wrong_arguments_are_refused():
    logits = random_logits(3, 10)
    for message, call in [
        ("top_k", lambda: native.top_k_top_p_(logits, torch.zeros(2, dtype=torch.int64), torch.ones(3))),
        ("top_k", lambda: native.top_k_top_p_(logits, torch.zeros(3, dtype=torch.int32), torch.ones(3))),
        ("top_p", lambda: native.top_k_top_p_(logits, torch.zeros(3, dtype=torch.int64), torch.ones(3).double())),
        ("logits", lambda: native.argmax(logits.double())),
        ("logits", lambda: native.softmax(logits[0])),
        ("words", lambda: native.argmax(torch.empty(2, 0))),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
