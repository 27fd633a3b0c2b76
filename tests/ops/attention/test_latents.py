"""Attention over latents, which are both keys and values, and products of heads that have separate weights."""

from __future__ import annotations

import math

import pytest
import torch

from pace import _C
from pace.batch import BLOCK_SIZE, KVSpec, Latent, Spans
from pace.ops import native, reference
from pace.ops.protocol import AttentionOptions
from pace.quant import QuantizationConfig
from tests.ops.isas import FLOATS, each_isa
from tests.support import poison

LENGTH = 70
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
SHAPES = [(1, 512, 64), (16, 512, 64), (20, 40, 6), (5, 16, 4), (130, 33, 8)]  # heads, rank, rope_dim


class Text:
    """One sequence over a cache that starts as NaN, with its blocks in falling order."""

    def __init__(self, heads: int, rank: int, rope_dim: int, dtype: torch.dtype, length: int = LENGTH):
        generator = torch.Generator().manual_seed(heads)

        def draw(count: int, dim: int) -> torch.Tensor:
            return torch.randn(length, count, dim, generator=generator)

        self.length = length
        self.q, self.latent_q = draw(heads, rope_dim), draw(heads, rank)
        self.key, self.latent = draw(1, rope_dim), 3 * draw(1, rank)
        self.scale = (rank + rope_dim) ** -0.5
        blocks = -(-length // BLOCK_SIZE)
        [self.kv] = KVSpec((Latent(rank, rope_dim),), dtype).allocate(blocks)
        poison(self.kv)
        self.table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)[None]
        position = torch.arange(length)
        self.slots = self.table[0, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        native.store_kv(self.key, self.latent, self.kv, self.slots)

    def attend(self, ops, step: int, newest: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of all positions, `step` tokens at a time."""
        outs = []
        for begin in range(0, self.length, step):
            end = min(self.length, begin + step)
            of_step = None if newest is None else newest[begin:end].int()
            spans = Spans(torch.tensor([0, end - begin]).int(), torch.tensor([end]).int(), self.table, of_step)
            q, latent_q = self.q[begin:end], self.latent_q[begin:end]
            outs.append(ops.attention(q, self.kv, spans, AttentionOptions(self.scale), latent_q=latent_q))
        return torch.cat(outs)

    def expected(self, newest: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
        """The definition in float64 over the cache's contents, and the tolerance for float32.

        A score is a chain of `rank + rope_dim` products, with an error of one eps of the sum of their sizes for each.
        Weights have the same error, and their sum with values adds another `length` eps."""
        dtype, kv, blocks = torch.float64, self.kv, self.table[0].long()
        key, latent = kv.k[blocks, 0].to(dtype), kv.v[blocks, 0, :, : kv.value_dim].to(dtype)
        if kv.k_scales is not None:
            key = key * kv.k_scales[blocks, 0][:, None].to(dtype)
            latent = latent * kv.v_scales[blocks, 0][:, :, None].to(dtype)
        key, latent = key.transpose(1, 2).flatten(0, 1)[: self.length], latent.flatten(0, 1)[: self.length]
        whole_q, whole_key = torch.cat([self.q, self.latent_q], -1).to(dtype), torch.cat([key, latent], -1)
        scores = self.scale * torch.einsum("thd,jd->htj", whole_q, whole_key)
        sizes = self.scale * torch.einsum("thd,jd->htj", whole_q.abs(), whole_key.abs())
        position = torch.arange(self.length)
        hidden = position[None] > (position if newest is None else newest)[:, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        off = 2 * whole_key.shape[1] * float(sizes.max()) + self.length + 80
        out = torch.einsum("htj,jd->thd", weights, latent).flatten(1)
        return out, 2.0**-24 * off * float(latent.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_definition_and_in_every_cut(shape, dtype):
    for isa in each_isa():
        text = Text(*shape, dtype)
        expected, tolerance = text.expected()
        found = text.attend(native, LENGTH)
        assert (found - expected).abs().max() < tolerance, isa
        for step in (1, 7, 64):
            assert torch.equal(text.attend(native, step), found), (isa, step)
    assert (text.attend(reference, LENGTH) - expected).abs().max() < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_that_see_later_latents(shape, dtype):
    position = torch.arange(LENGTH)
    later = torch.minimum(position + 9, torch.tensor(LENGTH - 1))
    for isa in each_isa():
        text = Text(*shape, dtype)
        assert torch.equal(text.attend(native, LENGTH, position), text.attend(native, LENGTH)), isa
        found = {}
        for threads in (1, 2, 5):
            _C.set_num_threads(threads)
            found[threads] = text.attend(native, LENGTH, later)
            assert torch.equal(found[threads], found[1]), (isa, threads)
        expected, tolerance = text.expected(later)
        assert (found[1] - expected).abs().max() < tolerance, isa
    assert (text.attend(reference, LENGTH, later) - expected).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_threads_and_partitions_change_nothing(dtype):
    text, found = Text(5, 64, 16, dtype, 1200), []
    for threads in (1, 2, 3, 16):
        _C.set_num_threads(threads)
        found.append(text.attend(native, 400))
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert (found[0] - text.expected()[0]).abs().max() < text.expected()[1]


def test_queries_of_latents_may_be_views():
    text = Text(4, 24, 8, torch.bfloat16)
    expected = text.attend(native, LENGTH)
    both = torch.cat([text.latent_q, text.q], -1)
    text.latent_q, text.q = both[:, :, :24], both[:, :, 24:]
    assert torch.equal(text.attend(native, LENGTH), expected)


def test_queries_that_do_not_fit_are_refused():
    text = Text(4, 24, 8, torch.bfloat16)
    text.latent_q = text.latent_q[:, :, :23]
    with pytest.raises(ValueError, match=r"latent_q must be \[70, 4, 24\]"):
        text.attend(native, LENGTH)


# ------------------------------------------------------------------------------------------------ heads_linear

LAYOUTS = [torch.float32, torch.bfloat16, torch.float16, "int8", "int4", "mxfp4"]


def stack_of(ops, matrices: torch.Tensor, layout: torch.dtype | str):
    """Weights `[H, N, K]` as a stack."""
    heads, n, k = matrices.shape
    if isinstance(layout, torch.dtype):
        stack = ops.empty_stack(heads, n, k, layout)
        for weight, matrix in zip(stack.experts, matrices):
            ops.pack_rows_(weight, matrix, 0)
        return stack
    format = QuantizationConfig(layout).for_modules({"m": "format"}, False)["m"].for_width(k)
    stack = ops.empty_stack(heads, n, k, format.layout)
    for weight, matrix in zip(stack.experts, matrices):
        ops.pack_quantized_(weight, ops.quantize(matrix, format), 0)
    return stack


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("heads, n, k", [(3, 40, 24), (16, 64, 128), (1, 16, 32)])
def test_heads_linear_is_the_product_of_each_head(heads, n, k, layout):
    """Each head has the bits of `linear` with that head's weight, for a strided view and for a copy."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(40, heads, k + 8, generator=generator)[:, :, 8:]
    matrices = torch.randn(heads, n, k, generator=generator)
    for isa in each_isa(FLOATS):
        _C.set_num_threads(1)
        stack = stack_of(native, matrices, layout)
        found = native.heads_linear(x, stack)
        for h, weight in enumerate(stack.experts):
            expected = native.linear(x[:, h].contiguous(), weight)
            assert torch.equal(found[:, h * n : (h + 1) * n], expected), (isa, h)
        for rows in (1, 3, 17):
            assert torch.equal(native.heads_linear(x[:rows], stack), found[:rows]), (isa, rows)
        for threads in (3, 16):
            _C.set_num_threads(threads)
            assert torch.equal(native.heads_linear(x, stack), found), (isa, threads)
        assert native.heads_linear(x[:0], stack).shape == (0, heads * n)


def test_heads_linear_against_the_reference():
    generator = torch.Generator().manual_seed(0)
    x, matrices = torch.randn(9, 3, 24, generator=generator), torch.randn(3, 40, 24, generator=generator)
    found = native.heads_linear(x, stack_of(native, matrices, torch.float32))
    expected = torch.einsum("thk,hnk->thn", x.double(), matrices.double()).flatten(1)
    assert (found - expected).abs().max() < 24 * 2.0**-24 * 60
    assert torch.allclose(reference.heads_linear(x, stack_of(reference, matrices, torch.float32)), found, atol=1e-5)


def test_heads_that_do_not_fit_are_refused():
    stack = native.empty_stack(3, 16, 8, torch.float32)
    for shape in ((1, 2, 8), (1, 3, 7)):
        with pytest.raises(ValueError, match=r"the weights are 3 x \[16, 8\]"):
            native.heads_linear(torch.zeros(shape), stack)
    with pytest.raises(ValueError, match="of gate and up"):
        native.heads_linear(torch.zeros(1, 3, 8), native.empty_stack(3, 16, 8, torch.float32, glu=True))
