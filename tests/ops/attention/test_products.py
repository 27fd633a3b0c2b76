"""How exactly attention multiplies, over caches whose products are not those of fp32 (`docs/numerics.md`)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pace.ops import native
from pace.ops.protocol import AttentionOptions
from tests.ops.isas import attention_rounds, on_each_isa
from tests.ops.test_attention import Sequence, as_stored, fill_cache, make_spans

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 14, 2, 64, 1500


def last_row(sequence: Sequence, dtype: torch.dtype) -> Tensor:
    """Attention of the last token `[heads, D]`."""
    kv, (blocks,) = fill_cache([sequence], dtype)
    spans = make_spans([(1, sequence.length, blocks)])
    return native.attention(sequence.q[-1:], kv, spans, AttentionOptions(HEAD_DIM**-0.5)).view(HEADS, HEAD_DIM)


def plain(sequence: Sequence, stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The same as `transformers` does it without a fused kernel: products rounded to `dtype`, softmax in float32."""
    q = sequence.q[-1].to(dtype).view(KV_HEADS, -1, HEAD_DIM)
    k, v = (as_stored(heads, stored).to(dtype).transpose(0, 1) for heads in (sequence.k, sequence.v))
    scores = q @ k.transpose(1, 2) * HEAD_DIM**-0.5
    weights = scores.softmax(-1, torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)
    return (weights @ v).view(HEADS, HEAD_DIM).double()


def heads_of(kind: str) -> Sequence:
    """Normal heads; with a few large elements as in Qwen2; with one position that takes nearly all weight; flat."""
    generator = torch.Generator().manual_seed(len(kind))
    q, k, v = (torch.randn(LENGTH, h, HEAD_DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))
    if kind == "outliers":
        q[..., ::16], k[..., ::16] = 8 * q[..., ::16], 8 * k[..., ::16] + 5
        v[:, :, 3] *= 20
    if kind == "peak":
        k[700] = q[-1, ::7] * 1.5
        v[:4] *= 50  # values with large scales and no weight
        k[:4] = -q[-1, ::7]
    if kind == "flat":
        q *= 0.01
    return Sequence(q, k, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@on_each_isa
def test_the_error_is_below_that_of_bf16(dtype):
    for kind in ("normal", "outliers", "peak", "flat"):
        sequence = heads_of(kind)
        exact = plain(sequence, dtype, torch.float64)
        ours, theirs = (
            (found - exact).norm(dim=-1)
            for found in (last_row(sequence, dtype), plain(sequence, dtype, torch.bfloat16))
        )
        bound = {"bf16": 0.9, "codes": 0.05, "fp32": 0.01}[attention_rounds(dtype)]
        assert ours.norm() < bound * theirs.norm(), (kind, float(ours.norm() / theirs.norm()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@on_each_isa
def test_equal_values_are_their_average(dtype):
    """The sum of weights is that of the weights that are multiplied, as far as codes of 16 bits allow."""
    sequence = heads_of("normal")
    sequence.v[:] = torch.randn(KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    expected = as_stored(sequence.v, dtype)[0].repeat_interleave(HEADS // KV_HEADS, 0)
    error = (last_row(sequence, dtype) - expected).abs().max()
    assert error <= (2.0**-16 if dtype == torch.int8 else 2.0**-18) * expected.abs().max() * math.sqrt(LENGTH)


@on_each_isa
def test_neighbours_in_a_pair_that_a_row_does_not_see_have_no_influence():
    """A window begins and ends within pairs and quads of positions whose others are NaN."""
    for dtype in (torch.bfloat16, torch.int8):
        generator = torch.Generator().manual_seed(1)
        sequence = Sequence(*(torch.randn(80, h, HEAD_DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)))
        options = AttentionOptions(HEAD_DIM**-0.5, 19)
        for length in (37, 38, 39, 40):
            kv, (blocks,) = fill_cache([sequence], dtype)
            spans = make_spans([(1, length, blocks)])
            expected = native.attention(sequence.q[length - 1 : length], kv, spans, options)
            keys, values = (
                (kv.k, kv.v) if dtype == torch.bfloat16 else (kv.k_scales[:, :, None], kv.v_scales[..., None])
            )
            for p in (*range(length - 19), *range(length, 80)):
                keys[blocks[p // 16], ..., p % 16] = math.nan
                values[blocks[p // 16], :, p % 16] = math.nan
            assert torch.equal(native.attention(sequence.q[length - 1 : length], kv, spans, options), expected)
