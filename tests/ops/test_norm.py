"""Norms against float64, on strided rows; a row's bits depend only on that row."""

from __future__ import annotations

import pytest
import torch

from pace import _C
from pace.ops import native, reference
from tests.ops.isas import on_each_isa

EPS = 2.0**-24


def inputs(rows: int, k: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(k)
    wide = torch.randn(rows, k + 3, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    weight, bias = torch.randn(2, k, generator=generator)
    return wide[:, :k], weight, bias


@on_each_isa
def test_rms_norm():
    for k in (1, 3, 4, 15, 16, 17, 63, 64, 65, 127, 896, 1000):
        x, weight, _ = inputs(5, k)
        y = native.rms_norm(x, weight, 1e-6)
        expected = reference.rms_norm(x.double(), weight.double(), 1e-6)
        # A sum of k positive squares has a relative error of at most k eps, and its root half of that. There are four
        # more roundings.
        assert ((y - expected).abs() <= (k / 2 + 6) * EPS * expected.abs()).all(), k


@pytest.mark.parametrize("affine", ["weight and bias", "weight", "bias", "none"])
@on_each_isa
def test_layer_norm(affine):
    for k in (1, 2, 5, 16, 17, 64, 100, 768):
        layer_norm_of(k, affine)


def layer_norm_of(k, affine):
    x, weight, bias = inputs(5, k)
    weight = weight if "weight" in affine else None
    bias = bias if "bias" in affine else None
    y = native.layer_norm(x, weight, bias, 1e-5)
    expected = reference.layer_norm(x.double(), weight, bias, 1e-5)
    # The mean's error, k eps mean|s|, is added to the usual error of k rounded additions.
    s = x.double()
    deviation = (s.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    shift = (k + 2) * EPS * s.abs().mean(-1, keepdim=True) / deviation
    scaled = (s - s.mean(-1, keepdim=True)).abs() / deviation
    gain = 1.0 if weight is None else weight.double().abs()
    tolerance = (
        shift * (1 + scaled * (1 + shift)) + (k / 2 + 8) * EPS * (scaled + s.abs() / deviation)
    ) * gain + 2 * EPS * expected.abs()
    tolerance = tolerance + (0 if bias is None else 2 * EPS * bias.double().abs())
    assert ((y - expected).abs() <= tolerance).all(), k


@on_each_isa
def test_head_rms_norm_works_in_place_on_a_view():
    fused = torch.randn(7, 6, 40)
    weight = torch.randn(40)
    got, expected = fused.clone(), fused.clone().double()
    native.head_rms_norm_(got[:, 2:5], weight, 1e-6)
    reference.head_rms_norm_(expected[:, 2:5], weight.double(), 1e-6)
    assert torch.equal(got[:, :2], fused[:, :2]) and torch.equal(got[:, 5:], fused[:, 5:])
    assert ((got - expected).abs() <= 30 * EPS * expected.abs()).all()


@on_each_isa
@pytest.mark.parametrize("has_one", [False, True], ids=["weights for each head", "one weight and a bias"])
def test_head_layer_norm_works_in_place_on_a_view(has_one):
    fused = torch.randn(7, 6, 40, generator=torch.Generator().manual_seed(2))
    weight, bias = (torch.randn(40), torch.randn(40)) if has_one else (torch.randn(3, 40), None)
    got, expected = fused.clone(), fused.clone().double()
    native.head_layer_norm_(got[:, 2:5], weight, bias, 1e-6)
    reference.head_layer_norm_(expected[:, 2:5], weight.double(), bias if bias is None else bias.double(), 1e-6)
    assert torch.equal(got[:, :2], fused[:, :2]) and torch.equal(got[:, 5:], fused[:, 5:])
    weights = weight.expand(3, 40).contiguous()
    each = [native.layer_norm(fused[:, 2 + h].contiguous(), weights[h], bias, 1e-6) for h in range(3)]
    assert torch.equal(got[:, 2:5], torch.stack(each, 1))
    # The bound of test_layer_norm, with elements, mean and deviation of about 1.
    assert ((got - expected).abs() <= 60 * EPS * (1 + fused[:, :6].abs().amax()) * weight.abs().max()).all()


@on_each_isa
def test_a_row_does_not_depend_on_the_others_or_the_threads():
    x, weight, bias = inputs(300, 200)
    results = []
    for threads in (1, 2):
        _C.set_num_threads(threads)
        results.append((native.rms_norm(x, weight, 1e-6), native.layer_norm(x, weight, bias, 1e-6)))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    row = native.rms_norm(x[99:100], weight, 1e-6), native.layer_norm(x[99:100], weight, bias, 1e-6)
    assert all(torch.equal(a[99:100], b) for a, b in zip(results[0], row))


def test_nothing_to_do():
    assert native.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    native.head_rms_norm_(torch.empty(0, 2, 8), torch.ones(8), 1e-6)


def test_wrong_arguments_are_refused():
    x, w = torch.randn(4, 8), torch.randn(8)
    for message, call in [
        ("weight", lambda: native.rms_norm(x, w[:7], 1e-6)),
        ("weight", lambda: native.rms_norm(x, w.double(), 1e-6)),
        ("bias", lambda: native.layer_norm(x, w, torch.randn(9), 1e-6)),
        ("x must", lambda: native.rms_norm(x.T, torch.randn(4), 1e-6)),
        ("x must", lambda: native.rms_norm(x.half(), w, 1e-6)),
        ("x must", lambda: native.head_rms_norm_(x, w, 1e-6)),
        ("weight must", lambda: native.head_layer_norm_(torch.randn(4, 2, 8), torch.randn(9), None, 1e-6)),
        ("weight must", lambda: native.head_layer_norm_(torch.randn(4, 2, 8), torch.randn(8, 2).T, None, 1e-6)),
        ("bias must", lambda: native.head_layer_norm_(torch.randn(4, 2, 8), w, torch.randn(2, 8), 1e-6)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
