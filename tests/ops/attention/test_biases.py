"""Attention with a bias for each distance: against float64, and bit for bit against itself for every division."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pace import _C
from pace.ops import native, reference
from pace.ops.protocol import AttentionOptions
from tests.ops.attention.test_newest import all_of, assert_close, in_one_span, symmetric
from tests.ops.isas import each_isa, on_each_isa
from tests.ops.test_attention import DTYPES, Sequence, as_stored, attend, fill_cache, make_sequence, make_spans

RADII = (0, 1, 5, 16, 128, 400)
"""The table of a length of 150 is one number, narrower than a vector, narrower than the text, and wider."""


def table(heads: int, radius: int, seed: int = 0) -> Tensor:
    return torch.randn(heads, 2 * radius + 1, generator=torch.Generator().manual_seed(seed)) * 3


def with_bias(sequence: Sequence, dtype: torch.dtype, bias: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in float64 for all positions, and the tolerance for fp32. `bias` float64 `[H, T, T]` is added to
    the scores; positions that are `hidden`, bool `[T, T]`, are not seen.

    The error of a score is at most D eps sum|q k| scale. Later roundings add 4 eps of its size and of the bias. A
    weight w has an error of w times that. The sum of weights and the sum over values add a few eps of their size."""
    length, heads, head_dim = sequence.q.shape
    scale, eps, group = head_dim**-0.5, 2.0**-24, heads // sequence.k.shape[1]
    q = sequence.q.double().transpose(0, 1)
    k, v = (as_stored(t, dtype).transpose(0, 1).repeat_interleave(group, 0) for t in (sequence.k, sequence.v))
    scores = scale * q @ k.transpose(1, 2)
    weights = (scores + bias).masked_fill(hidden, -math.inf).softmax(-1)
    error = (head_dim + 3) * eps * scale * (q.abs() @ k.abs().transpose(1, 2)) + 4 * eps * (bias.abs() + scores.abs())
    lost, magnitude = weights * error, weights @ v.abs()
    tolerance = 2 * (lost @ v.abs() + lost.sum(-1, keepdim=True) * magnitude) + (80 + length / 64) * eps * magnitude
    return tuple(t.transpose(0, 1).flatten(1) for t in (weights @ v, tolerance + 1e-37))


def definition(
    sequence: Sequence, dtype: torch.dtype, biases: Tensor, window: int | None, newest: Tensor
) -> tuple[Tensor, Tensor]:
    """`with_bias` for a table of biases, position by position."""
    length, radius = sequence.length, biases.shape[1] // 2
    bias = torch.zeros(len(biases), length, length, dtype=torch.float64)
    for p in range(length):
        for j in range(length):
            bias[:, p, j] = biases[:, radius + min(max(j - p, -radius), radius)]
    p, j = torch.arange(length)[:, None], torch.arange(length)
    hidden = j > newest[:, None]
    if window is not None:
        hidden = hidden | (j <= p - window)
    return with_bias(sequence, dtype, bias, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [None, 41])
def test_close_to_float64(window, dtype):
    sequence = make_sequence(150, 6, 2, 20, seed=3)
    newest = symmetric(150, window) if window else all_of(150)
    for radius in RADII:
        biases = table(6, radius)
        expected, tolerance = definition(sequence, dtype, biases, window, newest)
        for isa in each_isa():
            kv, (blocks,) = fill_cache([sequence], dtype)
            options = {"window": window, "biases": biases}
            assert_close(in_one_span(sequence, kv, blocks, newest, **options), expected, tolerance, (isa, radius))
            in_torch = in_one_span(sequence, kv, blocks, newest, ops=reference, **options)
            assert_close(in_torch, expected, 2 * tolerance, radius)


@pytest.mark.parametrize("dtype", DTYPES)
@on_each_isa
def test_bits_do_not_depend_on_chunks_or_threads(dtype):
    """1,100 positions cross a partition. A row's bits are those in a chunk, and cut over threads."""
    sequence, newest = make_sequence(1100, 6, 2, 24, seed=1), all_of(1100)
    kv, (blocks,) = fill_cache([sequence], dtype)
    for radius in (5, 128):
        biases = table(6, radius)
        whole = in_one_span(sequence, kv, blocks, newest, biases=biases)
        causal = attend(sequence, kv, blocks, 1100, biases=biases)
        assert torch.equal(attend(sequence, kv, blocks, 100, biases=biases), causal), radius
        for threads in (1, 3, 16):
            _C.set_num_threads(threads)
            for first in (0, 900, 1099):
                found = in_one_span(sequence, kv, blocks, newest, first, biases=biases)
                assert torch.equal(found, whole[first:]), (radius, threads, first)


@on_each_isa
def test_biases_of_zero_change_no_bit():
    sequence = make_sequence(130, 4, 2, 40, seed=2)
    kv, (blocks,) = fill_cache([sequence], torch.bfloat16)
    for options in ({}, {"sinks": torch.randn(4)}, {"window": 30}):
        plain = attend(sequence, kv, blocks, 64, **options)
        assert torch.equal(attend(sequence, kv, blocks, 64, biases=torch.zeros(4, 9), **options), plain), options
        assert not torch.equal(attend(sequence, kv, blocks, 64, biases=table(4, 4), **options), plain), options


def test_what_is_refused():
    sequence = make_sequence(20, 4, 2, 8, seed=0)
    kv, (blocks,) = fill_cache([sequence], torch.float32)
    spans = make_spans([(20, 20, blocks)])
    good = torch.zeros(4, 7)
    for biases in (good[:3], good.double(), good[:, :6].contiguous(), good[0], good.T.contiguous().T):
        with pytest.raises(ValueError, match=r"biases must be contiguous float32 \[4, 2 R \+ 1\]"):
            native.attention(sequence.q, kv, spans, AttentionOptions(1.0, biases=biases))
    for options in ({"softcap": 2.0}, {"slopes": torch.ones(4)}):
        with pytest.raises(ValueError, match="scores with biases have no softcap and no slopes"):
            AttentionOptions(1.0, biases=good, **options)
