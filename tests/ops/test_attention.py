"""Attention and the cache: against float64, and bit for bit against itself for every division of the work."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pace import _C
from pace.batch import BLOCK_SIZE, KVBlocks, KVSpec, Positions, Spans
from pace.ops import native, reference
from pace.ops.protocol import AttentionOptions
from tests.ops.isas import each_isa, on_each_isa
from tests.support import poison

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@dataclass
class Sequence:
    """Queries, keys and values of all positions `[length, heads, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[0]


def make_sequence(length: int, heads: int, kv_heads: int, head_dim: int, seed: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(length, h, head_dim, generator=generator) for h in (heads, kv_heads, kv_heads))
    k[length // 2] *= 6  # one position dominates, so that the running maximum moves
    return Sequence(q, k, v)


def fill_cache(sequences: list[Sequence], dtype: torch.dtype, seed: int = 0) -> tuple[KVBlocks, list[list[int]]]:
    """A cache of NaN with every sequence in blocks of a shuffled order, and the blocks of each sequence."""
    kv_heads, head_dim = sequences[0].k.shape[1:]
    counts = [-(-s.length // BLOCK_SIZE) for s in sequences]
    kv = KVSpec((Positions(kv_heads, head_dim, head_dim),), dtype).allocate(sum(counts) + 2)[0]
    poison(kv)
    free = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = []
    for sequence, count in zip(sequences, counts):
        blocks = [free.pop() for _ in range(count)]
        slots = torch.tensor([blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(sequence.length)])
        native.store_kv(sequence.k, sequence.v, kv, slots)
        tables.append(blocks)
    return kv, tables


def make_spans(
    parts: list[tuple[int, int, list[int]]], newest: Tensor | None = None, oldest: Tensor | None = None
) -> Spans:
    """Spans from `(tokens, kv_len, blocks)`. Unused entries of a block table are -1."""
    starts, lengths = [0], []
    table = torch.full((len(parts), max(len(blocks) for _, _, blocks in parts) + 1), -1, dtype=torch.int32)
    for s, (tokens, kv_len, blocks) in enumerate(parts):
        starts.append(starts[-1] + tokens)
        lengths.append(kv_len)
        table[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in (starts, lengths))
    return Spans(starts, lengths, table, newest, oldest)


def attention(q: Tensor, kv: KVBlocks, spans: Spans, scale: float = 1.0, **options) -> Tensor:
    return native.attention(q, kv, spans, AttentionOptions(scale, **options))


def attend(sequence: Sequence, kv: KVBlocks, blocks: list[int], span: int, **options) -> Tensor:
    """Attention of all positions of a sequence, `span` tokens at a time."""
    scale = sequence.q.shape[-1] ** -0.5
    outputs = []
    for begin in range(0, sequence.length, span):
        end = min(begin + span, sequence.length)
        spans = make_spans([(end - begin, end, blocks)])
        outputs.append(attention(sequence.q[begin:end], kv, spans, scale, **options))
    return torch.cat(outputs)


def as_stored(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 `[T, Hkv, D]`, rounded as a cache of the dtype stores them."""
    if dtype != torch.int8:
        return heads.to(dtype).double()
    scales = (heads.abs().amax(-1, keepdim=True) / 127).double()
    return (heads.double() / scales).round() * scales


def expected_and_tolerance(
    sequence: Sequence,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    chunked: bool = False,
    newest: Tensor | None = None,
    first: int = 0,
    oldest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition in float64 on keys and values rounded to the cache's dtype, and the tolerance for fp32.

    Both are for the queries from `first` on.

    A score is a chain of D rounded products, so its error is at most D eps sum|q k| scale =: e. In int8 its scale is
    rounded once more. Weights then have a relative error of 2 e. The sum of up to n weighted values adds another few
    n eps of their magnitude."""
    length, heads, head_dim = sequence.q.shape
    group = heads // sequence.k.shape[1]
    q = sequence.q[first:].double().transpose(0, 1)
    k, v = (as_stored(t, dtype).transpose(0, 1).repeat_interleave(group, 0) for t in (sequence.k, sequence.v))
    scale, eps = head_dim**-0.5, 2.0**-24
    scores = scale * q @ k.transpose(1, 2)
    score_error = scale * (head_dim + 3) * eps * (q.abs() @ k.abs().transpose(1, 2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
        score_error = score_error + 8 * eps * softcap
    position = torch.arange(length)
    row = position[first:]
    hidden = position[None] > (row if newest is None else newest)[:, None]
    if window is not None:
        begin = row // window * window if chunked else row - window + 1
        hidden |= position[None] < (begin if oldest is None else begin.minimum(oldest))[:, None]
    scores, score_error = scores.masked_fill(hidden, -math.inf), score_error.masked_fill(hidden, 0.0)
    weights = scores.softmax(-1)
    magnitude = weights @ v.abs()
    worst = (score_error + 4 * eps * scores.masked_fill(hidden, 0.0).abs()).amax(-1, keepdim=True)
    tolerance = magnitude * (2 * worst + (80 + length / 64) * eps) + 1e-37  # many elements are 0 in int8
    return (t.transpose(0, 1).flatten(1) for t in (weights @ v, tolerance))


@pytest.fixture(autouse=True)
def two_threads(as_before):
    _C.set_num_threads(2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "length", "window", "softcap", "dtype"),
    [
        (1, 1, 1, 1, None, None, torch.float32),
        (2, 2, 64, 65, None, None, torch.float32),
        (4, 1, 80, 130, None, None, torch.bfloat16),
        (14, 2, 64, 70, None, None, torch.bfloat16),
        (6, 3, 37, 100, 17, None, torch.float16),
        (3, 1, 96, 90, 64, 20.0, torch.bfloat16),
        (2, 1, 256, 40, None, 5.0, torch.float32),
        (1, 1, 130, 33, 1, None, torch.float16),
        (2, 1, 512, 20, None, None, torch.bfloat16),
        (2, 2, 64, 65, None, None, torch.int8),
        (14, 2, 64, 70, None, None, torch.int8),
        (6, 3, 37, 100, 17, None, torch.int8),
        (16, 1, 96, 90, 64, 20.0, torch.int8),
        (1, 1, 1, 40, None, None, torch.int8),
        (2, 1, 512, 20, None, 5.0, torch.int8),
    ],
)
def test_close_to_float64(heads, kv_heads, head_dim, length, window, softcap, dtype):
    sequence = make_sequence(length, heads, kv_heads, head_dim, seed=head_dim)
    expected, tolerance = expected_and_tolerance(sequence, dtype, window, softcap)
    for isa in each_isa():
        kv, (blocks,) = fill_cache([sequence], dtype)
        for span in (length, 7):
            got = attend(sequence, kv, blocks, span, window=window, softcap=softcap)
            assert got.isfinite().all(), (isa, span)
            excess = ((got - expected).abs() / tolerance).max().item()
            assert excess <= 1, f"{isa}, span {span}: {excess:.2f} times the tolerance"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 7, 64, 100, 1030])
def test_chunks_do_not_see_each_other(window, dtype):
    length = max(150, window + 70)
    sequence = make_sequence(length, *((6, 2) if length < 1000 else (2, 1)), 24, seed=window)
    expected, tolerance = expected_and_tolerance(sequence, dtype, window, None, chunked=True)
    for isa in each_isa():
        kv, (blocks,) = fill_cache([sequence], dtype)
        at_once = attend(sequence, kv, blocks, length, window=window, chunked=True)
        assert ((at_once - expected).abs() <= tolerance).all(), isa
        for span in (1, 7, 64) if length < 1000 else (100,):
            assert torch.equal(attend(sequence, kv, blocks, span, window=window, chunked=True), at_once), (isa, span)
        last = attend(sequence, kv, blocks, length, window=window)[-1]
        assert window == 1 or length % window == 0 or not torch.equal(at_once[-1], last), isa


def test_long_contexts_close_to_float64():
    sequence = make_sequence(2600, 2, 1, 16, seed=5)
    kv, (blocks,) = fill_cache([sequence], torch.float32)
    expected, tolerance = expected_and_tolerance(sequence, torch.float32, None, None)
    assert ((attend(sequence, kv, blocks, 2600) - expected).abs() <= tolerance).all()


def test_sinks_close_to_float64():
    """A sink is one more score, without a value. It takes all weight if far above the scores, and none if far below."""
    sinks = torch.tensor([-1e30, -400.0, -3.0, 0.5, 60.0, 400.0, 1e30, 2.0])
    for length in (1, 90, 2100):
        sequence = make_sequence(length, 8, 2, 16, seed=length)
        kv, (blocks,) = fill_cache([sequence], torch.float32)
        expected, tolerance = expected_and_tolerance(sequence, torch.float32, None, None, first=length - 1)
        q, k = sequence.q[-1:].double().transpose(0, 1), sequence.k.double().transpose(0, 1).repeat_interleave(4, 0)
        last = (q @ k.transpose(1, 2) / 4).squeeze(1)
        share = 1 / (1 + (sinks.double() - last.logsumexp(-1)).exp())  # of the weight, left for the values
        wanted = (expected[-1].view(8, 16) * share[:, None]).flatten()
        for isa in each_isa():
            for rows in (length, 1) if length < 1000 else (100,):
                spans = make_spans([(rows, length, blocks)])
                got = attention(sequence.q[-rows:], kv, spans, 0.25, sinks=sinks)[-1]
                assert got.isfinite().all(), (isa, length, rows)
                assert ((got - wanted).abs() <= 8 * tolerance[-1]).all(), (isa, length, rows)
        with pytest.raises(ValueError, match="sinks must be a contiguous vector of 8"):
            attend(sequence, kv, blocks, length, sinks=sinks[:7])


@pytest.mark.parametrize("window", [None, 50, 1100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_span(window, dtype):
    # 1,100 positions cross a partition; 14 query heads on 2 key heads give tiles of rows that begin within a token.
    sequence = make_sequence(1100, 14, 2, 40, seed=1)
    kv, (blocks,) = fill_cache([sequence], dtype)
    at_once = attend(sequence, kv, blocks, 1100, window=window)
    for span in (7, 16, 64, 100):
        assert torch.equal(attend(sequence, kv, blocks, span, window=window), at_once), span
    singles = [1, 15, 63, 64, 65, 500, 1023, 1024, 1025, 1099]
    for p in singles:
        one = attention(sequence.q[p : p + 1], kv, make_spans([(1, p + 1, blocks)]), 40**-0.5, window=window)
        assert torch.equal(one[0], at_once[p]), p


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@on_each_isa
def test_bits_do_not_depend_on_isa_neutral_cuts(dtype):
    sequence = make_sequence(140, 6, 2, 24, seed=2)
    kv, (blocks,) = fill_cache([sequence], dtype)
    at_once = attend(sequence, kv, blocks, 140)
    for span in (1, 7, 64):
        assert torch.equal(attend(sequence, kv, blocks, span), at_once), span


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_bits_do_not_depend_on_the_batch_the_blocks_or_the_threads(dtype):
    sequences = [make_sequence(length, 6, 2, 32, seed=length) for length in (1, 20, 130, 1500, 2100)]
    spans = [1, 5, 130, 1, 40]
    outputs = []
    for seed in (0, 1):
        kv, tables = fill_cache(sequences, dtype, seed)
        parts = [(n, s.length, blocks) for n, s, blocks in zip(spans, sequences, tables)]
        for order in (range(5), reversed(range(5))):
            order = list(order)
            q = torch.cat([sequences[i].q[-spans[i] :] for i in order])
            for threads in (1, 2, 3, 8, 16):
                _C.set_num_threads(threads)
                rows = attention(q, kv, make_spans([parts[i] for i in order]), 0.2).split([spans[i] for i in order])
                outputs.append([rows[order.index(i)] for i in range(5)])
        alone = [attention(s.q[-n:], kv, make_spans([part]), 0.2) for n, s, part in zip(spans, sequences, parts)]
        outputs.append(alone)
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(7, 64), (8, 128), (16, 80)])
@on_each_isa
def test_rows_cut_over_threads_have_the_same_bits(heads, head_dim, dtype):
    sequence = make_sequence(500, heads, 1, head_dim, seed=heads)
    kv, (blocks,) = fill_cache([sequence], dtype)
    query, spans, scale = sequence.q[-1:], make_spans([(1, 500, blocks)]), head_dim**-0.5
    kinds = [{}, {"window": 400}, {"softcap": 5.0}]
    outputs = []
    for threads in (1, 2, 3, 8, 16):
        _C.set_num_threads(threads)
        outputs.append([attention(query, kv, spans, scale, **kind) for kind in kinds])
    for kind, first, *others in zip(kinds, *outputs):
        assert first.isfinite().all(), kind
        assert all(torch.equal(other, first) for other in others), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("kv_len", [1, 16, 17, 64, 100, 1025])
@pytest.mark.parametrize("chunked", [False, True])
def test_what_lies_beyond_kv_len_or_before_the_window_is_never_read(kv_len, dtype, chunked):
    sequence = make_sequence(1200, 2, 1, 20, seed=3)
    kv, (blocks,) = fill_cache([sequence], dtype)
    q = sequence.q[kv_len - 1 : kv_len]
    seen = {"window": 30, "chunked": chunked}
    oldest = (kv_len - 1) // 30 * 30 if chunked else max(0, kv_len - 30)
    expected = attention(q, kv, make_spans([(1, kv_len, blocks)]), 0.3, **seen)
    keys, values = (kv.k_scales.unsqueeze(2), kv.v_scales.unsqueeze(3)) if dtype == torch.int8 else (kv.k, kv.v)
    for p in [*range(oldest), *range(kv_len, 1200)]:
        keys[blocks[p // 16], :, :, p % 16] = math.nan
        values[blocks[p // 16], :, p % 16] = math.inf
    unmapped = [-1 if b < oldest // 16 or b * 16 >= kv_len else block for b, block in enumerate(blocks)]
    got = attention(q, kv, make_spans([(1, kv_len, unmapped)]), 0.3, **seen)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_token_that_is_not_finite_spoils_only_those_that_see_it(dtype):
    sequence = make_sequence(150, 4, 2, 32, seed=4)
    clean, (blocks,) = fill_cache([sequence], dtype)
    expected = attend(sequence, clean, blocks, 150)
    sequence.k[70, 0, 3:], sequence.v[90, 0] = math.nan, math.inf
    kv, (blocks,) = fill_cache([sequence], dtype)
    got = attend(sequence, kv, blocks, 150).view(150, 2, -1)
    assert torch.equal(got[:70, 0], expected.view(150, 2, -1)[:70, 0])
    assert torch.equal(got[:, 1], expected.view(150, 2, -1)[:, 1])
    assert got[70:, 0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 16, 37, 64])
@on_each_isa
def test_store_kv_rounds_as_torch(dtype, head_dim):
    generator = torch.Generator().manual_seed(head_dim)
    fused = torch.randn(19, 8, head_dim, generator=generator) * 1e3
    fused[0, 3, 0], fused[1, 4, 0], fused[2, 5, 0] = math.nan, math.inf, 1e-42
    fused[3], fused[4], fused[5], fused[6] = 0.0, 1e-42, 3.4e38, -math.inf
    fused[7] = 127.0 - torch.arange(head_dim) / 2
    k, v = fused[:, 2:4], fused[:, 4:6]  # strided views of one matrix, like those of a fused projection
    slots = torch.randperm(64, generator=generator)[:19]
    (kv,), (other,) = (KVSpec((Positions(2, head_dim, head_dim),), dtype).allocate(4) for _ in range(2))
    for tensor in (*kv.tensors, *other.tensors):
        tensor.fill_(7)
    native.store_kv(k, v, kv, slots)
    reference.store_kv(k, v, other, slots)
    for got, expected in zip(kv.tensors, other.tensors, strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(
    ("window", "softcap", "chunked"), [(None, None, False), (30, None, False), (None, 5.0, False), (30, None, True)]
)
@on_each_isa
def test_attention_is_its_reference(dtype, window, softcap, chunked):
    sequence = make_sequence(90, 6, 2, 40, seed=9)
    kv, (blocks,) = fill_cache([sequence], dtype)
    spans = make_spans([(90, 90, blocks)])
    _, tolerance = expected_and_tolerance(sequence, dtype, window, softcap, chunked)
    found, expected = (
        ops.attention(sequence.q, kv, spans, AttentionOptions(40**-0.5, window, softcap, chunked=chunked))
        for ops in (native, reference)
    )
    assert ((found - expected).abs() <= 2 * tolerance).all()


def test_int8_is_off_by_at_most_half_a_scale():
    """The error of int8 is at most 1/254 of the largest element of a head."""
    heads = make_sequence(60, 1, 3, 50, seed=10).k
    kv, (blocks,) = fill_cache([Sequence(heads, heads, heads)], torch.int8)
    position = torch.arange(60)
    block, offset = torch.tensor(blocks)[position // BLOCK_SIZE], position % BLOCK_SIZE
    for elements, scales in (
        (kv.k[block, :, :, offset], kv.k_scales[block, :, offset]),
        (kv.v[block, :, offset, :50], kv.v_scales[block, :, offset]),
    ):
        assert torch.equal(elements.abs().amax(-1), torch.full((60, 3), 127, dtype=torch.int8))
        error = (elements.double() * scales[..., None].double() - heads.double()).abs()
        assert (error <= heads.abs().amax(-1, keepdim=True).double() / 253.9).all() and error.max() > 0


def test_strided_queries():
    sequence = make_sequence(40, 4, 2, 32, seed=6)
    kv, (blocks,) = fill_cache([sequence], torch.float32)
    fused = torch.randn(40, 8 * 32)
    fused[:, : 4 * 32] = sequence.q.flatten(1)
    view = fused[:, : 4 * 32].view(40, 4, 32)
    spans = make_spans([(40, 40, blocks)])
    assert torch.equal(attention(view, kv, spans, 0.2), attention(sequence.q, kv, spans, 0.2))


def test_empty_spans_and_empty_batches():
    sequence = make_sequence(20, 2, 1, 16, seed=7)
    kv, (blocks,) = fill_cache([sequence], torch.float32)
    spans = make_spans([(0, 20, blocks), (1, 20, blocks), (0, 0, blocks)])
    assert torch.equal(
        attention(sequence.q[19:], kv, spans, 0.25),
        attention(sequence.q[19:], kv, make_spans([(1, 20, blocks)]), 0.25),
    )
    assert attention(sequence.q[:0], kv, make_spans([(0, 20, blocks)]), 0.25).shape == (0, 32)


def test_several_python_threads_at_once():
    sequences = [make_sequence(1300, 4, 2, 32, seed=s) for s in range(3)]
    kv, tables = fill_cache(sequences, torch.float32)
    expected = [attend(s, kv, blocks, 1300) for s, blocks in zip(sequences, tables)]

    def work(i: int) -> bool:
        return all(torch.equal(attend(sequences[i % 3], kv, tables[i % 3], 650), expected[i % 3]) for _ in range(4))

    with ThreadPoolExecutor(4) as workers:
        assert all(workers.map(work, range(8)))


def test_wrong_arguments_are_refused_with_what_was_wrong():
    sequence = make_sequence(40, 4, 2, 32, seed=8)
    kv, (blocks,) = fill_cache([sequence], torch.float32)
    int8, _ = fill_cache([sequence], torch.int8)
    q, good = sequence.q, make_spans([(40, 40, blocks)])

    def spans(start=(0, 40), kv_len=(40,), table=None):
        rows = [blocks] if table is None else table
        return Spans(*(torch.tensor(t, dtype=torch.int32) for t in (start, kv_len, rows)))

    cases = [
        ("query_start", lambda: attention(q, kv, spans(start=(0, 39)))),
        ("query_start", lambda: attention(q, kv, spans(start=(1, 40)))),
        ("less than its own", lambda: attention(q, kv, spans(kv_len=(39,)))),
        ("blocks hold", lambda: attention(q, kv, spans(kv_len=(49,)))),
        ("block table", lambda: attention(q, kv, spans(table=[[0, -1, 1]]))),
        ("block table", lambda: attention(q, kv, spans(table=[[0, 1, 5]]))),
        ("Hq", lambda: attention(q[:, :3], kv, good)),
        ("Hq", lambda: attention(q[..., :31], kv, good)),
        ("float32", lambda: attention(q.double(), kv, good)),
        ("window", lambda: attention(q, kv, good, window=0)),
        ("softcap", lambda: attention(q, kv, good, softcap=0.0)),
        ("float32, bfloat16", lambda: attention(q, KVBlocks(kv.k.double(), kv.v.double()), good)),
        ("cache values", lambda: attention(q, KVBlocks(kv.k, kv.v[..., :16]), good)),
        ("cache keys", lambda: attention(q, KVBlocks(kv.k[..., :8], kv.v), good)),
        ("each block contiguous", lambda: attention(q, KVBlocks(kv.k[:1].expand(kv.k.shape), kv.v), good)),
        ("int32", lambda: attention(q, kv, Spans(good.query_start.long(), good.kv_len, good.block_table))),
        (
            "have scales where they are int8",
            lambda: attention(q, KVBlocks(kv.k.to(torch.int8), kv.v.to(torch.int8)), good),
        ),
        (
            "have scales where they are int8",
            lambda: attention(q, KVBlocks(kv.k, kv.v, int8.k_scales, int8.v_scales), good),
        ),
        ("scales right behind", lambda: attention(q, replace(int8, k_scales=int8.k_scales.clone()), good)),
        ("scales right behind", lambda: attention(q, replace(int8, v_scales=int8.k_scales), good)),
        ("scales right behind", lambda: attention(q, replace(int8, v=int8.v.clone()), good)),
        ("slot 80", lambda: native.store_kv(sequence.k[:1], sequence.v[:1], kv, torch.tensor([80]))),
        ("slot -1", lambda: native.store_kv(sequence.k[:1], sequence.v[:1], kv, torch.tensor([-1]))),
        ("tokens", lambda: native.store_kv(sequence.k[:2], sequence.v[:1], kv, torch.tensor([0, 1]))),
        ("slots", lambda: native.store_kv(sequence.k[:2], sequence.v[:2], kv, torch.tensor([0, 1], dtype=torch.int32))),
    ]
    for message, call in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_blocks_are_as_long_as_the_kernels_think() -> None:
    assert _C.BLOCK_POSITIONS == BLOCK_SIZE
