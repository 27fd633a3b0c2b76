"""Attention in which tokens see positions before their window (`Spans.oldest`): whole images that are longer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pace import _C
from pace.ops import native, reference
from pace.ops.protocol import AttentionOptions
from tests.ops.attention.test_newest import THREADS, assert_close
from tests.ops.isas import on_each_isa
from tests.ops.test_attention import DTYPES, expected_and_tolerance, fill_cache, make_sequence, make_spans

LENGTH = 1150
"""Two partitions of positions; the second image is in both."""
IMAGES = ((40, 130), (990, 1060), (1060, 1100))


def sight(length: int) -> tuple[Tensor, Tensor]:
    """Newest and oldest positions of a text with whole images."""
    newest, oldest = torch.arange(length), torch.arange(length)
    for start, end in IMAGES:
        newest[start:end], oldest[start:end] = end - 1, start
    return newest, oldest


def attend(sequence, kv, blocks, newest, oldest, first: int = 0, ops=native, last: int = LENGTH, **options) -> Tensor:
    """Attention of the positions `first .. last`, as one span."""
    given = [None if each is None else each[first:last].int() for each in (newest, oldest)]
    spans = make_spans([(last - first, last, blocks)], *given)
    scale = sequence.q.shape[-1] ** -0.5
    return ops.attention(sequence.q[first:last], kv, spans, AttentionOptions(scale, **options))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"window": 9}, torch.float32),
        *(
            pytest.param(options, dtype, marks=pytest.mark.thorough)
            for options in ({"window": 33, "softcap": 5.0}, {"window": 80, "chunked": True})
            for dtype in DTYPES
        ),
    ],
    ids=str,
)
@on_each_isa
def test_rows_that_see_beyond_their_window(options, dtype):
    sequence, (newest, oldest) = make_sequence(LENGTH, 2, 1, 16, seed=3), sight(LENGTH)
    kv, (blocks,) = fill_cache([sequence], dtype)
    softcap, chunked = options.get("softcap"), options.get("chunked", False)
    expected, tolerance = expected_and_tolerance(
        sequence, dtype, options["window"], softcap, chunked, newest=newest, oldest=oldest
    )
    whole = attend(sequence, kv, blocks, newest, oldest, **options)
    assert_close(whole, expected, tolerance)
    assert_close(attend(sequence, kv, blocks, newest, oldest, ops=reference, **options), expected, 2 * tolerance)
    late = [-1] * 53 + blocks[53:]  # what no position from 990 on sees
    for threads in THREADS:
        _C.set_num_threads(threads)
        for first, last in ((0, LENGTH), (40, 130), (990, LENGTH), (1060, 1100), (1149, LENGTH)):
            found = attend(sequence, kv, late if first >= 990 else blocks, newest, oldest, first, last=last, **options)
            assert torch.equal(found, whole[first:last]), (threads, first)
    causal = attend(sequence, kv, blocks, None, None, **options)
    assert not torch.equal(whole, causal)
    for given in ((newest, oldest), (newest, None)):
        assert torch.equal(attend(sequence, kv, blocks, *given, causal=True, **options), causal)
    assert torch.equal(
        attend(sequence, kv, blocks, newest, oldest, ops=reference, causal=True, **options),
        attend(sequence, kv, blocks, None, None, ops=reference, **options),
    )


def test_oldest_positions_that_do_not_fit_are_refused():
    sequence, (newest, oldest) = make_sequence(40, 4, 2, 32, seed=8), (torch.arange(40), torch.arange(40))
    kv, (blocks,) = fill_cache([sequence], torch.float32)
    for value in (-1, 40):
        bad = oldest.clone()
        bad[7] = value
        with pytest.raises(ValueError, match=f"the oldest position of token 7 is {value}; it must be between 0 and 39"):
            attend(sequence, kv, blocks, newest, bad, last=40, window=5)
    with pytest.raises(ValueError, match="oldest must be a contiguous vector of 40 torch.int32"):
        spans = make_spans([(40, 40, blocks)], newest.int(), oldest)
        native.attention(sequence.q, kv, spans, AttentionOptions(0.2, window=5))
    seen = oldest.clone()
    seen[20] = 3
    missing = [-1, *blocks[1:]]
    with pytest.raises(ValueError, match="entry 0 of the block table is -1"):
        attend(sequence, kv, missing, newest, seen, 19, last=40, window=3)
