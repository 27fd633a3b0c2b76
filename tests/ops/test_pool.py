"""Rows of texts that become one: against sums in float64, and alone as among others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pace.ops import native, reference
from pace.ops.pooling import POOLINGS
from tests.ops.isas import on_each_isa

LENGTHS = [1, 2, 15, 16, 17, 1, 300]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def by_hand(rows: Tensor, pooling: str) -> tuple[Tensor, Tensor]:
    """The pooled row in float64, and a bound of the error of a float32 sum in order. It has n roundings of at most the
    sum of magnitudes, and a few more of weights and division."""
    n, exact = len(rows), rows.double()
    weights = torch.arange(1, n + 1, dtype=torch.float64) if pooling == "weightedmean" else torch.ones(n).double()
    divisor = {"mean": n, "mean_sqrt_len_tokens": math.sqrt(n), "weightedmean": n * (n + 1) / 2}.get(pooling, 1.0)
    if pooling in ("cls", "lasttoken", "max"):
        pick = {"cls": exact[0], "lasttoken": exact[-1], "max": exact.max(0).values}[pooling]
        return pick, torch.zeros_like(pick)
    return weights @ exact / divisor, (n + 4) * 2.0**-24 * (weights @ exact.abs()) / divisor


@pytest.mark.parametrize("columns", [1, 7, 127, 128, 129, 385])
@on_each_isa
def test_pooled_rows(columns) -> None:
    """Rows with a stride, and mixed signs with heavy tails."""
    generator = torch.Generator().manual_seed(columns)
    wide = torch.randn(sum(LENGTHS), columns + 3, generator=generator)
    x = (wide * wide.abs())[:, 2 : columns + 2]
    starts = starts_of(LENGTHS)
    for pooling in POOLINGS:
        ours, theirs = native.pool(x, starts, pooling), reference.pool(x, starts, pooling)
        assert ours.shape == theirs.shape == (len(LENGTHS), columns)
        for text, rows in enumerate(x.split(LENGTHS)):
            exact, bound = by_hand(rows, pooling)
            for found in (ours, theirs):
                assert ((found[text] - exact).abs() <= bound).all(), (pooling, text)
            alone = native.pool(rows, starts_of([len(rows)]), pooling)[0]
            assert torch.equal(ours[text], alone), (pooling, text)


def test_a_nan_of_a_text_stays_in_it() -> None:
    x = torch.ones(6, 3)
    x[1, 1] = torch.nan
    for pooling in ("max", "mean", "weightedmean", "mean_sqrt_len_tokens"):
        assert native.pool(x, starts_of([3, 3]), pooling).isnan().nonzero().tolist() == [[0, 1]], pooling
    x[0, 1], x[1, 1] = torch.nan, 5.0  # also one that comes first
    assert native.pool(x, starts_of([3, 3]), "max")[0].isnan().tolist() == [False, True, False]


def test_no_texts() -> None:
    for ops in (native, reference):
        assert ops.pool(torch.empty(0, 5), starts_of([]), "mean").shape == (0, 5)


def test_what_is_refused() -> None:
    x = torch.zeros(6, 3)
    for message, starts, pooling in [
        ("pooling must be one of cls, max", starts_of([6]), "sum"),
        ("text 1 has no rows", starts_of([3, 0, 3]), "mean"),
        ("rows 0 to 5 of x, which has 6", starts_of([5]), "cls"),
        ("rows 1 to 6 of x", starts_of([6]) + torch.tensor([1, 0], dtype=torch.int32), "cls"),
        ("starts must be a contiguous vector", starts_of([6]).long(), "cls"),
        ("starts must be a contiguous vector", starts_of([6])[:0], "cls"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.pool(x, starts, pooling)
    with pytest.raises(ValueError, match="float32 matrix"):
        native.pool(x.double(), starts_of([6]), "mean")
    with pytest.raises(ValueError, match="pooling must be one of"):
        reference.pool(x, starts_of([6]), "sum")


@on_each_isa
def test_tanh() -> None:
    """tanh of elements, and in the epilogue of a product. Its error is 4 ulp (kernels/vec_math.inl)."""
    x = torch.linspace(-12, 12, 3001)[None]
    exact = torch.tanh(x.double())
    assert ((native.activation(x, "tanh") - exact).abs() <= 8 * 2.0**-24 * exact.abs()).all()
    assert torch.equal(reference.activation(x, "tanh"), torch.tanh(x))
    weight = native.empty_weight(5, 9, torch.float32)
    native.pack_rows_(weight, torch.randn(5, 9, generator=torch.Generator().manual_seed(0)), 0)
    rows = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    found = native.linear(rows, weight, activation="tanh")
    assert torch.equal(found, native.activation(native.linear(rows, weight), "tanh"))
    assert native.activation(torch.tensor([[torch.nan]]), "tanh").isnan().all()
