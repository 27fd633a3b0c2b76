"""Compares a block with its written-out definition, for every combination of norms, order and scale."""

from __future__ import annotations

import itertools

import pytest
import torch

from pace.llm.layers import Block, Layer, NoNorm
from pace.ops import reference

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FIRST, SECOND = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Product(Layer):
    """A stand-in for both the mixer and the feed-forward."""

    cache = None
    readers = ()

    def __init__(self, matrix):
        self.matrix = matrix

    def __call__(self, ops, x, *_, residual=None):
        y = torch.tanh(x @ self.matrix)
        return y if residual is None else residual + y


class Shift(Layer):
    """A stand-in for a norm, different for each `number`."""

    def __init__(self, number):
        self.number = number

    def __call__(self, ops, x):
        return self.number * x + 0.1 * self.number


def f(x):
    return torch.tanh(x @ FIRST)


def g(x):
    return torch.tanh(x @ SECOND)


def run(*args, **options):
    first, second = args
    return Block(first, Product(FIRST), second, Product(SECOND), **options)(reference, X.clone(), None, None, None)


@pytest.mark.parametrize("parallel, scale, post", list(itertools.product([False, True], [1.0, 0.25], [False, True])))
def test_two_norms(parallel, scale, post) -> None:
    before, other, after, last = map(Shift, (1.0, -0.5, 2.0, 3.0))
    norms = {"mixer_post_norm": after, "mlp_post_norm": last} if post else {}
    a, b = (after, last) if post else (NoNorm(), NoNorm())
    x = X + scale * a(None, f(before(None, X)))
    expected = x + scale * b(None, g(other(None, X if parallel else x)))
    assert torch.allclose(run(before, other, parallel=parallel, branch_scale=scale, **norms), expected, 1e-14, 1e-14)


def test_one_norm_for_two_branches_side_by_side() -> None:
    before = Shift(-1.5)
    normed = before(None, X)
    assert torch.equal(run(before, None, parallel=True), X + f(normed) + g(normed))


def test_norms_of_the_sums() -> None:
    after, last = Shift(1.5), Shift(-2.0)
    x = after(None, X + f(X))
    found = run(NoNorm(), NoNorm(), mixer_post_norm=after, mlp_post_norm=last, norms_sum=True)
    assert torch.equal(found, last(None, x + g(x)))


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="reads a norm of its own"):
        run(Shift(1.0), None)
    for options in ({"parallel": True}, {"branch_scale": 0.5}):
        with pytest.raises(ValueError, match="norms of the sum"):
            run(NoNorm(), NoNorm(), norms_sum=True, **options)


def test_norms_and_who_reads_them() -> None:
    """Norms and their readers, which a migration of channels may scale (pace/calibrate)."""
    mixer, mlp = Product(FIRST), Product(SECOND)
    mixer.readers, mlp.readers = ["qkv"], ["gate", "router"]
    first, second = Shift(1.0), Shift(2.0)
    assert Block(first, mixer, second, mlp).norm_readers() == [(first, ["qkv"]), (second, ["gate", "router"])]
    assert Block(first, mixer, None, mlp, parallel=True).norm_readers() == [(first, ["qkv", "gate", "router"])]
    of_sums = Block(NoNorm(), mixer, NoNorm(), mlp, mixer_post_norm=first, mlp_post_norm=second, norms_sum=True)
    assert of_sums.norm_readers() == [], "what the norms give is the residual stream, too"
