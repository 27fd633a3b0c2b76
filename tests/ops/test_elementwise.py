"""Scaling, capping, rotary embedding and given rows, which work in place."""

from __future__ import annotations

import pytest
import torch

from pace.ops import native, reference
from tests.ops.isas import on_each_isa


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (2, 40_000)])
@on_each_isa
def test_agreement_with_the_reference(shape) -> None:
    x = 20 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = x.clone(), x.clone()
    native.scale_(ours, 1 / 3)
    reference.scale_(theirs, 1 / 3)
    assert torch.equal(ours, theirs)
    native.softcap_(ours, 3.0)
    exact = 3 * torch.tanh(theirs.double() / 3)
    # tanh has an error of 4 ulp; the division before it and the product after it half an ulp each.
    assert ((ours - exact).abs() <= 8 * 2.0**-24 * exact.abs()).all() and ours.abs().max() <= 3
    reference.softcap_(theirs, 3.0)
    assert (theirs - exact).abs().max() < 1e-5


def test_columns_of_a_matrix_alone() -> None:
    x = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0))
    expected = x.clone()
    native.scale_(x[:, 7:40_000], 2.0)
    expected[:, 7:40_000] *= 2
    assert torch.equal(x, expected)
    native.softcap_(x[:, 9:30_001], 1.5)
    capped = expected[:, 9:30_001].contiguous()
    native.softcap_(capped, 1.5)
    expected[:, 9:30_001] = capped
    assert torch.equal(x, expected)


@on_each_isa
def test_columns_have_factors_of_their_own() -> None:
    x = torch.randn(5, 20_000, generator=torch.Generator().manual_seed(0))
    factors = torch.linspace(-3, 3, 19_990)
    expected = x.clone()
    native.scale_(x[:, 7:19_997], factors)
    reference.scale_(expected[:, 7:19_997], factors)
    assert torch.equal(x, expected)
    with pytest.raises(ValueError, match="factor must be a contiguous vector of 19989"):
        native.scale_(x[:, 7:19_996], factors)


def test_a_nan_stays_one() -> None:
    x = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf]])
    native.softcap_(x, 2.0)
    assert x[0, 1].isnan() and x[0, 2:].tolist() == [2.0, -2.0]


def test_what_is_refused() -> None:
    x = torch.zeros(2, 4)
    for bad in (x.double(), x.t(), x[0], x[:, ::2]):
        with pytest.raises(ValueError, match="x must be a float32 matrix with contiguous rows"):
            native.scale_(bad, 2.0)
    for cap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cap must be positive"):
            native.softcap_(x, cap)
    with pytest.raises(ValueError, match="factor must be finite"):
        native.scale_(x, float("inf"))


# -- rotary embedding: strided views, both forms, whole and partial


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "half"),
    [(1, 1, 2, 1), (5, 3, 40, 10), (70, 4, 64, 32), (2, 2, 80, 16), (3, 1, 38, 19)],
)
@on_each_isa
def test_rotary(tokens, heads, head_dim, half) -> None:
    fused = torch.randn(tokens, heads + 2, head_dim)
    angle = torch.randn(tokens, half)
    for interleaved in (False, True):
        got, expected = fused.clone(), fused.clone()
        native.rotary_(got[:, 1 : heads + 1], angle.cos(), angle.sin(), interleaved)
        reference.rotary_(expected[:, 1 : heads + 1], angle.cos(), angle.sin(), interleaved)
        assert torch.equal(got, expected), interleaved  # including the elements around the view


def test_what_rotary_refuses() -> None:
    x, table = torch.randn(4, 2, 16), torch.randn(4, 8)
    for message, call in [
        ("rotate 18", lambda: native.rotary_(x, torch.randn(4, 9), torch.randn(4, 9), False)),
        ("cos", lambda: native.rotary_(x, table[:3], table, False)),
        ("sin", lambda: native.rotary_(x, table, table[:, :4], False)),
        ("cos", lambda: native.rotary_(x, table.double(), table, False)),
        ("contiguous D", lambda: native.rotary_(x.transpose(1, 2), table, table, False)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# -- rows that are given in place of computed ones, or added to them


@pytest.mark.parametrize("ops", [native, reference])
def test_given_rows_are_copied(ops) -> None:
    whole = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    copy = ops.given_rows(whole[:, 3:9])
    assert torch.equal(copy, whole[:, 3:9]) and copy.is_contiguous()
    copy.zero_()
    assert whole.all()
    assert ops.given_rows(whole[:0]).shape == (0, 12)


@pytest.mark.parametrize("ops", [native, reference])
def test_matrices_side_by_side(ops) -> None:
    whole = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    both = ops.concatenate(whole[:, 7:], whole[:, 1:3])
    assert torch.equal(both, torch.cat([whole[:, 7:], whole[:, 1:3]], 1)) and both.is_contiguous()
    assert ops.concatenate(whole[:0], whole[:0, :3]).shape == (0, 15)
    with pytest.raises((ValueError, RuntimeError)):
        ops.concatenate(whole, whole[:4])


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("places", [[], [0], [1, 4, 5], list(range(7))])
@on_each_isa
def test_placed_rows(places, add) -> None:
    """Columns of a wider matrix go to columns of another one; 20,000 columns are more than one chunk."""
    generator = torch.Generator().manual_seed(1)
    for columns in (1, 20_000):
        rows = torch.randn(len(places), columns + 5, generator=generator)[:, 2 : columns + 2]
        at, start = torch.tensor(places, dtype=torch.int64), torch.randn(7, columns + 3, generator=generator)
        ours, theirs, expected = start.clone(), start.clone(), start.clone()
        for place, row in zip(places, rows):
            expected[place, 1 : columns + 1] = row + start[place, 1 : columns + 1] if add else row
        native.place_rows_(ours[:, 1 : columns + 1], rows, at, add)
        reference.place_rows_(theirs[:, 1 : columns + 1], rows, at, add)
        assert torch.equal(ours, expected) and torch.equal(theirs, expected)


def test_what_given_rows_refuse() -> None:
    x, rows = torch.zeros(4, 6), torch.ones(2, 6)
    for places, message in [
        ([1, 4], "row 4 of 4"),
        ([-1, 2], "row -1 of 4"),
        ([2, 1], "ascend; got 2 before 1"),
        ([1, 1], "ascend; got 1 before 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.place_rows_(x, rows, torch.tensor(places), False)
    at = torch.tensor([0, 1])
    for message, call in [
        ("as wide as x; got 5 columns", lambda: native.place_rows_(x, rows[:, :5], at, False)),
        ("at must be a contiguous vector of 2", lambda: native.place_rows_(x, rows, at[:1], False)),
        ("at must be", lambda: native.place_rows_(x, rows, at.int(), False)),
        ("rows must be a float32 matrix", lambda: native.place_rows_(x, rows.double(), at, False)),
        ("rows must be a float32 matrix", lambda: native.given_rows(rows[0])),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert not x.any()
