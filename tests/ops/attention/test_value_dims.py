"""Attention over values that are wider or narrower than keys."""

from __future__ import annotations

import pytest
import torch

from pace.batch import BLOCK_SIZE, KVSpec, Positions, Spans
from pace.ops import native, reference
from pace.ops.protocol import AttentionOptions
from tests.support import poison

LENGTH = 70


def attend(ops, layer: Positions, dtype: torch.dtype, q, k, v, step: int, **options) -> torch.Tensor:
    """Attention of all positions of one sequence, `step` tokens at a time, over a cache that starts as NaN."""
    blocks = -(-LENGTH // BLOCK_SIZE)
    [kv] = KVSpec((layer,), dtype).allocate(blocks)
    poison(kv)
    table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)[None]
    position = torch.arange(LENGTH)
    slots = table[0, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    ops.store_kv(k, v, kv, slots)
    outs = []
    for begin in range(0, LENGTH, step):
        end = min(LENGTH, begin + step)
        starts, lengths = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
        outs.append(
            ops.attention(
                q[begin:end], kv, Spans(starts, lengths, table), AttentionOptions(0.3, layer.window, **options)
            )
        )
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("key_dim, value_dim, window", [(5, 40, None), (40, 5, 20), (24, 16, None), (16, 17, 9)])
def test_against_the_definition_and_in_every_cut(dtype, key_dim, value_dim, window) -> None:
    layer = Positions(2, key_dim, value_dim, window)
    generator = torch.Generator().manual_seed(key_dim)
    q, k, v = (
        torch.randn(LENGTH, heads, dim, generator=generator)
        for heads, dim in ((6, key_dim), (2, key_dim), (2, value_dim))
    )
    found = attend(native, layer, dtype, q, k, v, LENGTH)
    assert found.shape == (LENGTH, 6 * value_dim)
    expected = attend(reference, layer, dtype, q, k, v, LENGTH)
    # Weights are at most 1 and sum to 1. A score is a chain of key_dim products of numbers of about 3, and the
    # exponential keeps its error. Both caches hold the same rounded numbers.
    tolerance = 2 * (key_dim + LENGTH) * 2.0**-24 * 9 * float(v.abs().max())
    assert (found - expected).abs().max() < tolerance
    for step in (1, 7, 64):
        assert torch.equal(attend(native, layer, dtype, q, k, v, step), found)


def test_widths_that_do_not_fit_are_refused() -> None:
    [kv] = KVSpec((Positions(2, 8, 24),), torch.float32).allocate(1)
    k, v, slots = torch.zeros(1, 2, 8), torch.zeros(1, 2, 24), torch.zeros(1, dtype=torch.int64)
    native.store_kv(k, v, kv, slots)
    with pytest.raises(ValueError, match=r"v must be \[T, 2, 24\]"):
        native.store_kv(k, k, kv, slots)
    with pytest.raises(ValueError, match=r"k must be \[T, 2, 8\]"):
        native.store_kv(v, v, kv, slots)
    spans = Spans(torch.tensor([0, 1]).int(), torch.tensor([1]).int(), torch.zeros(1, 1).int())
    with pytest.raises(ValueError, match=r"q must be \[T, Hq, 8\]"):
        native.attention(v, kv, spans, AttentionOptions(1.0))
    [wide] = KVSpec((Positions(1, 8, 513),), torch.float32).allocate(1)
    with pytest.raises(ValueError, match="heads of 1 to 512 elements are supported"):
        native.store_kv(torch.zeros(1, 1, 8), torch.zeros(1, 1, 513), wide, slots)
