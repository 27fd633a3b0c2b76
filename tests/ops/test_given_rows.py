"""Rows that are given in place of computed ones, or added to them."""

from __future__ import annotations

import pytest
import torch

from pace.ops import native, reference
from tests.ops.isas import on_each_isa


@pytest.mark.parametrize("ops", [native, reference])
def test_given_rows_are_copied(ops) -> None:
    whole = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    copy = ops.given_rows(whole[:, 3:9])
    assert torch.equal(copy, whole[:, 3:9]) and copy.is_contiguous()
    copy.zero_()
    assert whole.all()
    assert ops.given_rows(whole[:0]).shape == (0, 12)


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


def test_what_is_refused() -> None:
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
