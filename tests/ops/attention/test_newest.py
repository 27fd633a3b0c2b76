"""Attention in which each token has a newest position that it sees (`Spans.newest`), before or after its own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pace import _C
from pace.ops import native, reference
from pace.ops.protocol import AttentionOptions
from tests.ops.isas import FLOATS, each_isa, on_each_isa
from tests.ops.test_attention import (
    DTYPES,
    attend,
    attention,
    expected_and_tolerance,
    fill_cache,
    make_sequence,
    make_spans,
)
from tests.plugins.tiers import sample

THREADS = (1, 2, 5)
FULL_LENGTHS = (1, 15, 16, 17, 64, 200)


def assert_close(found: Tensor, expected: Tensor, tolerance: Tensor, note: object = "") -> None:
    excess = ((found - expected).abs() / tolerance).max().item()
    assert excess <= 1, f"{note}: {excess:.2f} times the tolerance"  # NaN fails


def all_of(length: int, window: int | None = None) -> Tensor:
    return torch.full((length,), length - 1)


def symmetric(length: int, window: int | None) -> Tensor:
    """With `window = w + 1`, each token sees w positions on either side."""
    return (torch.arange(length) + (window or 17) - 1).clamp(max=length - 1)


def images(length: int, window: int | None = None) -> Tensor:
    """A causal text with two images, whose tokens see up to the end of their image."""
    newest = torch.arange(length)
    for start, end in ((length // 8, length // 2), (length // 2 + 3, length - 5)):
        newest[start:end] = max(start, end - 1)
    return newest


def later(length: int, window: int | None = None) -> Tensor:
    """Any position from the token's own on."""
    own, generator = torch.arange(length), torch.Generator().manual_seed(length)
    return own + (torch.rand(length, generator=generator) * (length - own)).long()


def anywhere(length: int, window: int | None) -> Tensor:
    """Any position from the oldest that the window shows on."""
    oldest = (torch.arange(length) - (window or length) + 1).clamp(min=0)
    generator = torch.Generator().manual_seed(length)
    return oldest + (torch.rand(length, generator=generator) * (length - oldest)).long()


KINDS = (all_of, symmetric, images, later, anywhere)


def in_one_span(sequence, kv, blocks, newest: Tensor | None, first: int = 0, ops=native, **options) -> Tensor:
    """Attention of the positions from `first` on, as one span."""
    spans = make_spans([(sequence.length - first, sequence.length, blocks)])
    if newest is not None:
        spans = make_spans([(sequence.length - first, sequence.length, blocks)], newest[first:].int())
    options = AttentionOptions(sequence.q.shape[-1] ** -0.5, **options)
    return ops.attention(sequence.q[first:], kv, spans, options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 16), (6, 2, 40), (7, 1, 64)])
@on_each_isa
def test_full_attention_within_spans_of_many_lengths(heads, kv_heads, head_dim, dtype):
    sequences = [make_sequence(length, heads, kv_heads, head_dim, seed=length) for length in FULL_LENGTHS]
    kv, tables = fill_cache(sequences, dtype)
    alone = [in_one_span(s, kv, blocks, all_of(s.length)) for s, blocks in zip(sequences, tables)]
    for sequence, blocks, found in zip(sequences, tables, alone):
        newest = all_of(sequence.length)
        expected, tolerance = expected_and_tolerance(sequence, dtype, None, None, newest=newest)
        assert_close(found, expected, tolerance, sequence.length)
        in_torch = in_one_span(sequence, kv, blocks, newest, ops=reference)
        assert_close(in_torch, expected, 2 * tolerance, sequence.length)
    for order in (range(len(sequences)), [5, 0, 3, 1], [4, 2]):
        q = torch.cat([sequences[i].q for i in order])
        newest = torch.cat([all_of(sequences[i].length) for i in order]).int()
        spans = make_spans([(sequences[i].length, sequences[i].length, tables[i]) for i in order], newest)
        for threads in THREADS:
            _C.set_num_threads(threads)
            found = attention(q, kv, spans, head_dim**-0.5)
            assert torch.equal(found, torch.cat([alone[i] for i in order])), (list(order), threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_full_attention_across_partitions(dtype):
    """1,500 positions are two partitions. Few rows are cut by partition, and rows of a tile by thread."""
    sequence = make_sequence(1500, 2, 1, 16, seed=1)
    newest = all_of(1500)
    expected, tolerance = expected_and_tolerance(sequence, dtype, None, None, newest=newest)
    for isa in each_isa():
        kv, (blocks,) = fill_cache([sequence], dtype)
        whole = in_one_span(sequence, kv, blocks, newest)
        assert_close(whole, expected, tolerance, isa)
        for threads in (*THREADS, 16):
            _C.set_num_threads(threads)
            for first in (0, 900, 1470, 1499):
                found = in_one_span(sequence, kv, blocks, newest, first)
                assert torch.equal(found, whole[first:]), (isa, threads, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (1, None), (9, 5.0), (65, None)], ids=lambda value: str(value)
)
@on_each_isa
def test_rows_that_see_before_and_after_themselves(window, softcap, dtype):
    sequence = make_sequence(150, 6, 2, 24, seed=3)
    kv, (blocks,) = fill_cache([sequence], dtype)
    for kind in KINDS:
        newest = kind(150, window)
        expected, tolerance = expected_and_tolerance(sequence, dtype, window, softcap, newest=newest)
        options = {"window": window, "softcap": softcap}
        whole = in_one_span(sequence, kv, blocks, newest, **options)
        assert_close(whole, expected, tolerance, kind)
        assert_close(in_one_span(sequence, kv, blocks, newest, ops=reference, **options), expected, 2 * tolerance, kind)
        for threads in THREADS:
            _C.set_num_threads(threads)
            for first in (0, 1, 70, 140, 149):
                found = in_one_span(sequence, kv, blocks, newest, first, **options)
                assert torch.equal(found, whole[first:]), (kind, threads, first)


@pytest.mark.parametrize("dtype", DTYPES)
@on_each_isa
def test_the_own_position_is_the_same_as_none(dtype):
    sequence = make_sequence(1100, 3, 1, 16, seed=4)
    kv, (blocks,) = fill_cache([sequence], dtype)
    sinks = torch.tensor([-3.0, 0.5, 4.0])
    for options in ({}, {"window": 50}, {"window": 70, "chunked": True}, {"softcap": 3.0}, {"sinks": sinks}):
        for threads in (2, 5):
            _C.set_num_threads(threads)
            for first in (0, 1099):
                found, expected = (
                    in_one_span(sequence, kv, blocks, newest, first, **options) for newest in (torch.arange(1100), None)
                )
                assert torch.equal(found, expected), (options, threads, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@on_each_isa
def test_images_in_a_text_that_is_computed_in_chunks(dtype):
    """The text before an image, the image, and the text after it give the same bits in one step and in several."""
    sequence = make_sequence(200, 4, 2, 32, seed=5)
    kv, (blocks,) = fill_cache([sequence], dtype)
    newest = torch.arange(200)
    newest[30:110] = 109
    whole = in_one_span(sequence, kv, blocks, newest, window=90)
    assert torch.equal(whole[:30], attend(sequence, kv, blocks, 1, window=90)[:30])
    assert torch.equal(whole[110:], attend(sequence, kv, blocks, 7, window=90)[110:])
    for chunks in (
        [(0, 30), (30, 110), (110, 200)],
        [(0, 111), (111, 112), (112, 200)],
        [(0, 9), (9, 110), (110, 200)],
    ):
        found = []
        for begin, end in chunks:
            spans = make_spans([(end - begin, end, blocks)], newest[begin:end].int())
            found.append(attention(sequence.q[begin:end], kv, spans, 32**-0.5, window=90))
        assert torch.equal(torch.cat(found), whole), chunks


def test_sinks_close_to_float64():
    sequence = make_sequence(90, 8, 2, 16, seed=6)
    sinks = torch.tensor([-1e30, -400.0, -3.0, 0.5, 60.0, 400.0, 1e30, 2.0])
    newest = later(90)
    expected, tolerance = expected_and_tolerance(sequence, torch.float32, None, None, newest=newest)
    q, k = sequence.q.double().transpose(0, 1), sequence.k.double().transpose(0, 1).repeat_interleave(4, 0)
    hidden = torch.arange(90) > newest[:, None]
    sums = (q @ k.transpose(1, 2) / 4).masked_fill(hidden, -math.inf).logsumexp(-1)
    share = 1 / (1 + (sinks.double()[:, None] - sums).exp())  # of the weight, left for the values
    wanted = (expected.view(90, 8, 16) * share.T[..., None]).flatten(1)
    for isa in each_isa():
        kv, (blocks,) = fill_cache([sequence], torch.float32)
        assert_close(in_one_span(sequence, kv, blocks, newest, sinks=sinks), wanted, 8 * tolerance, isa)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("last", [0, 15, 16, 40, 63, 64])
@on_each_isa
def test_what_no_row_sees_is_never_read(last, dtype):
    """Positions after the newest of every row are NaN, although they are before `kv_len`."""
    sequence = make_sequence(100, 4, 2, 20, seed=7)
    kv, (blocks,) = fill_cache([sequence], dtype)
    newest = torch.full((100,), last)
    expected = in_one_span(sequence, kv, blocks, newest)
    keys, values = (kv.k_scales.unsqueeze(2), kv.v_scales.unsqueeze(3)) if dtype == torch.int8 else (kv.k, kv.v)
    for p in range(last + 1, 100):
        keys[blocks[p // 16], :, :, p % 16] = math.nan
        values[blocks[p // 16], :, p % 16] = math.inf
    found = in_one_span(sequence, kv, blocks, newest)
    assert found.isfinite().all() and torch.equal(found, expected)


def test_newest_positions_that_do_not_fit_are_refused():
    sequence = make_sequence(40, 4, 2, 32, seed=8)
    kv, (blocks,) = fill_cache([sequence], torch.float32)

    def attend_to(newest: Tensor, **options) -> Tensor:
        return attention(sequence.q, kv, make_spans([(15, 15, blocks), (25, 40, blocks)], newest), 0.2, **options)

    good = torch.tensor([14] * 15 + [39] * 25, dtype=torch.int32)
    attend_to(good)
    for token, value, options, message in (
        (3, 15, {}, r"span 0: the newest position of token 3 is 15; it must be between 0 and 14"),
        (0, -1, {}, r"span 0: the newest position of token 0 is -1; it must be between 0 and 14"),
        (39, 40, {}, r"span 1: the newest position of token 39 is 40; it must be between 0 and 39"),
        (30, 25, {"window": 5}, r"span 1: the newest position of token 30 is 25; it must be between 26 and 39"),
        (
            30,
            27,
            {"window": 7, "chunked": True},
            r"span 1: the newest position of token 30 is 27; it must be between 28",
        ),
    ):
        bad = good.clone()
        bad[token] = value
        with pytest.raises(ValueError, match=message):
            attend_to(bad, **options)
    for wrong in (good[:39], good.long(), good[:, None], good.repeat(2)[::2]):
        with pytest.raises(ValueError, match="newest must be a contiguous vector of 40 torch.int32"):
            attend_to(wrong)


@st.composite
def steps(draw):
    """Spans of (tokens, kv_len, newest positions) and the options of the layer."""
    window = draw(st.none() | st.integers(1, 90))
    chunked = window is not None and draw(st.booleans())
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        kv_len = draw(st.integers(1, 40) | st.sampled_from([64, 65, 130, 1024, 1025, 1100]))
        tokens = draw(st.integers(1, min(kv_len, 40)))
        newest = []
        for position in range(kv_len - tokens, kv_len):
            oldest = 0 if window is None else max(0, position - window + 1)
            oldest = position // window * window if chunked else oldest
            newest.append(draw(st.integers(oldest, kv_len - 1)))
        spans.append((tokens, kv_len, newest))
    return spans, {"window": window, "chunked": chunked, "softcap": draw(st.none() | st.just(4.0))}


@pytest.mark.parametrize("max_examples", [40, pytest.param(600, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("isa", sample(FLOATS, lambda isa: isa == "generic"))
def test_random_steps(isa, max_examples):
    """Any step is close to the reference in float64, and has the same bits for each span alone and for all threads."""
    _C.select_isa(isa)

    @settings(max_examples=max_examples, deadline=None)
    @given(steps(), st.sampled_from([(1, 1), (4, 2), (7, 1)]), st.sampled_from([5, 24]), st.sampled_from(DTYPES))
    def check(step, heads, head_dim, dtype):
        spans, options = step
        sequences = [make_sequence(kv_len, *heads, head_dim, seed=kv_len) for _, kv_len, _ in spans]
        kv, tables = fill_cache(sequences, dtype)
        q = [s.q[s.length - tokens :] for s, (tokens, _, _) in zip(sequences, spans)]
        newest = [torch.tensor(values, dtype=torch.int32) for _, _, values in spans]
        parts = [(tokens, kv_len, blocks) for (tokens, kv_len, _), blocks in zip(spans, tables)]
        together, found = make_spans(parts, torch.cat(newest)), []
        for threads in THREADS:
            _C.set_num_threads(threads)
            found.append(attention(torch.cat(q), kv, together, 0.3, **options))
        alone = [attention(q, kv, make_spans([p], n), 0.3, **options) for q, p, n in zip(q, parts, newest)]
        assert all(torch.equal(other, found[0]) for other in (*found[1:], torch.cat(alone)))
        expected = reference.attention(torch.cat(q).double(), kv, together, AttentionOptions(0.3, **options))
        # The error of a score is at most D eps of sum |q k|, and weights have twice that. Values are at most `largest`.
        scores = 0.3 * max(float((s.q.abs().amax(0) @ s.k.abs().amax(0).T).max()) for s in sequences)
        largest = max(float(s.v.abs().max()) for s in sequences)
        tolerance = 2.0**-24 * largest * (2 * (head_dim + 16) * scores + 80 + 1100 / 64)
        assert (found[0] - expected).abs().max() <= tolerance

    check()
