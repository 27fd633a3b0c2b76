"""Attention with slopes (ALiBi): against float64, and bit for bit against itself for every division of the work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pace import _C
from pace.llm.layers import alibi_slopes
from pace.ops import native, reference
from pace.ops.protocol import AttentionOptions
from tests.ops.attention.test_biases import with_bias
from tests.ops.isas import each_isa, on_each_isa
from tests.ops.test_attention import (
    DTYPES,
    Sequence,
    attend,
    attention,
    fill_cache,
    make_sequence,
    make_spans,
)


def definition(
    sequence: Sequence, dtype: torch.dtype, slopes: Tensor, bf16_bias: bool = False, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """`with_bias` for slopes."""
    p, scale = torch.arange(sequence.length), sequence.q.shape[2] ** -0.5
    if bf16_bias:
        bias = scale * (slopes[:, None, None] * p.bfloat16().float()).bfloat16().double()
    else:
        bias = slopes.double()[:, None, None] * (p - p[:, None])
    hidden = p > p[:, None]
    if window is not None:
        hidden = hidden | (p <= p[:, None] - window)
    return with_bias(sequence, dtype, bias, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "bf16_bias"), [(None, False), (None, True), (17, False), (17, True)])
def test_close_to_float64(window, bf16_bias, dtype):
    sequence = make_sequence(150, 12, 4, 20, seed=3)
    slopes = alibi_slopes(12)
    expected, tolerance = definition(sequence, dtype, slopes, bf16_bias, window)
    for isa in each_isa():
        kv, (blocks,) = fill_cache([sequence], dtype)
        for span in (150, 7):
            got = attend(sequence, kv, blocks, span, window=window, slopes=slopes, bf16_bias=bf16_bias)
            assert ((got - expected).abs() <= tolerance).all(), (isa, span)
        spans = make_spans([(150, 150, blocks)])
        options = AttentionOptions(20**-0.5, window, slopes=slopes, bf16_bias=bf16_bias)
        theirs = reference.attention(sequence.q.double(), kv, spans, options)
        assert ((theirs - expected).abs() <= tolerance).all(), isa


@pytest.mark.parametrize("dtype", DTYPES)
@on_each_isa
def test_bits_do_not_depend_on_spans_or_threads(dtype):
    """1,100 positions cross a partition. A row's bits are those alone, in a chunk, and cut over threads."""
    sequence, slopes = make_sequence(1100, 6, 2, 24, seed=1), alibi_slopes(6)
    kv, (blocks,) = fill_cache([sequence], dtype)
    for options in ({"slopes": slopes}, {"slopes": slopes, "bf16_bias": True}, {"slopes": slopes, "window": 90}):
        _C.set_num_threads(2)
        at_once = attend(sequence, kv, blocks, 1100, **options)
        assert torch.equal(attend(sequence, kv, blocks, 100, **options), at_once), options
        for threads in (1, 3, 16):
            _C.set_num_threads(threads)
            for p in (0, 15, 64, 1023, 1024, 1099):
                one = attention(sequence.q[p : p + 1], kv, make_spans([(1, p + 1, blocks)]), 24**-0.5, **options)
                assert torch.equal(one[0], at_once[p]), (options, threads, p)


@on_each_isa
def test_slopes_of_zero_change_no_bit():
    sequence = make_sequence(130, 4, 2, 40, seed=2)
    kv, (blocks,) = fill_cache([sequence], torch.bfloat16)
    for options in ({}, {"sinks": torch.randn(4)}, {"window": 30}):
        plain = attend(sequence, kv, blocks, 64, **options)
        assert torch.equal(attend(sequence, kv, blocks, 64, slopes=torch.zeros(4), **options), plain), options
        assert not torch.equal(attend(sequence, kv, blocks, 64, slopes=torch.ones(4), **options), plain), options


def test_biases_are_exact_in_long_contexts():
    """A position far from the start gives the weights of one near it, if keys and values are the same there."""
    slopes, length = torch.tensor([0.3]), 5000
    sequence = Sequence(*(torch.ones(length, 1, 8) for _ in "qkv"))
    sequence.v[:] = torch.arange(length).remainder(7.0)[:, None, None]
    kv, (blocks,) = fill_cache([sequence], torch.float32)
    rows = [attention(sequence.q[:1], kv, make_spans([(1, n, blocks)]), 0.3, slopes=slopes) for n in (497, 4991)]
    # 4991 - 497 is a multiple of 7. The sums begin at other places of a tile; weights before 497 are below e^-140.
    torch.testing.assert_close(rows[0], rows[1], rtol=100 * 2.0**-24, atol=0.0)


@pytest.mark.parametrize(("heads", "expected"), [
    (1, [2**-8]),
    (4, [2**-2, 2**-4, 2**-6, 2**-8]),
    (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    (3, [2**-4, 2**-8, 2**-2]),
])  # fmt: skip
def test_slopes(heads, expected):
    assert alibi_slopes(heads).tolist() == expected
    assert torch.equal(alibi_slopes(heads, 16.0), alibi_slopes(heads).square())


def test_what_is_refused():
    sequence = make_sequence(20, 4, 2, 8, seed=0)
    kv, (blocks,) = fill_cache([sequence], torch.float32)
    spans = make_spans([(20, 20, blocks)])
    for slopes in (torch.ones(3), torch.ones(4).double(), torch.ones(4, 1)):
        with pytest.raises(ValueError, match="slopes must be a contiguous vector of 4"):
            native.attention(sequence.q, kv, spans, AttentionOptions(1.0, slopes=slopes))
    with pytest.raises(ValueError, match="scores with slopes have no softcap; got 2.0"):
        AttentionOptions(1.0, softcap=2.0, slopes=torch.ones(4))
