"""Rotary embedding, key/value cache and attention on the C++ kernels (csrc/kernels/attention.inl, rotary.inl)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pace import _C
from pace.batch import BLOCK_SIZE, KVBlocks
from pace.ops.checks import check_heads, check_vector, describe
from pace.ops.protocol import AttentionOptions

if TYPE_CHECKING:
    from pace.batch import LayerBlocks, Spans

# Numbers of DType in csrc/include/pace/types.h.
CACHE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}


def rotary_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    tokens, _, head_dim = check_heads("x", x)
    half = cos.shape[-1]
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32 or table.shape != (tokens, half) or not table.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32 [{tokens}, R / 2], as the other; got {describe(table)}"
            )
    if 2 * half > head_dim:
        raise ValueError(f"cos and sin rotate {2 * half} elements of a head, but x has heads of {head_dim}")
    _C.rotary(x, cos, sin, interleaved)


def store_kv(k: Tensor, v: Tensor, kv: LayerBlocks, slots: Tensor) -> None:
    view, kv_heads = kv_view(kv), kv.k.shape[1]
    for name, tensor, dim in (("k", k, kv.k.shape[2]), ("v", v, kv.value_dim)):
        if check_heads(name, tensor)[1:] != (kv_heads, dim):
            raise ValueError(f"{name} must be [T, {kv_heads}, {dim}] for this cache; got {describe(tensor)}")
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"k has {k.shape[0]} tokens, v has {v.shape[0]}")
    check_vector("slots", slots, k.shape[0], torch.int64)
    _C.store_kv(view, k, v, slots)


def attention(
    q: Tensor, kv: LayerBlocks, spans: Spans, options: AttentionOptions, latent_q: Tensor | None = None
) -> Tensor:
    """Numerics: fp32. A token's bits depend only on the positions it sees, and on the keys and values there. They do
    not depend on spans, blocks or threads."""
    view, (_, kv_heads, key_dim, _) = kv_view(kv), kv.k.shape
    tokens, heads, query_dim = check_heads("q", q)
    if query_dim != key_dim or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q must be [T, Hq, {key_dim}] with Hq a multiple of the {kv_heads} heads of the cache; got {describe(q)}"
        )
    if latent_q is not None and check_heads("latent_q", latent_q) != (tokens, heads, kv.value_dim):
        raise ValueError(
            f"latent_q must be [{tokens}, {heads}, {kv.value_dim}] for this cache; got {describe(latent_q)}"
        )
    check_vectors_of_heads(options, heads)
    table = spans.block_table
    if table.dtype != torch.int32 or table.ndim != 2 or not table.is_contiguous():
        raise ValueError(f"block_table must be a contiguous int32 matrix [spans, blocks]; got {describe(table)}")
    check_vector("query_start", spans.query_start, len(table) + 1, torch.int32)
    check_vector("kv_len", spans.kv_len, len(table), torch.int32)
    for name, places in (("newest", spans.newest), ("oldest", spans.oldest)):
        if places is not None:
            check_vector(name, places, tokens, torch.int32)
    out = torch.empty(tokens, heads * kv.value_dim)
    _C.attention(view, q, latent_q, spans, options, out)
    return out


def check_vectors_of_heads(options: AttentionOptions, heads: int) -> None:
    """Raises ValueError for sinks or slopes that do not have a number for each query head. The same for biases without
    an odd number for each."""
    for name in ("sinks", "slopes"):
        if (vector := getattr(options, name)) is not None:
            check_vector(name, vector, heads)
    biases = options.biases
    if biases is not None and (
        biases.dtype != torch.float32
        or biases.ndim != 2
        or biases.shape[0] != heads
        or biases.shape[1] % 2 == 0
        or not biases.is_contiguous()
    ):
        raise ValueError(f"biases must be contiguous float32 [{heads}, 2 R + 1]; got {describe(biases)}")


def kv_view(kv: LayerBlocks) -> _C.KvView:
    """Returns the C++ view of a layer's cache. Raises unless k and v have the layout of
    docs/architecture/kernels.md."""
    if not isinstance(kv, KVBlocks):
        raise NotImplementedError("attention reads and writes the KVBlocks of a layer; got a layer without a cache")
    k, v = kv.k, kv.v
    if k.dtype not in CACHE_DTYPES or v.dtype != k.dtype:
        raise TypeError(
            f"a cache is float32, bfloat16, float16 or int8, keys and values alike; got {k.dtype} and {v.dtype}"
        )
    for name, blocks, scales in (("keys", k, kv.k_scales), ("values", v, kv.v_scales)):
        if (scales is not None) != (k.dtype == torch.int8):
            raise ValueError(
                f"cache {name} have scales where they are int8, and only there; got {blocks.dtype} "
                f"{'without' if scales is None else 'with'} scales"
            )
    if k.ndim != 4 or k.shape[3] != BLOCK_SIZE or not _has_contiguous_heads(k, kv.k_scales):
        raise ValueError(f"cache keys must be [blocks, Hkv, D, {BLOCK_SIZE}], {_LAYOUT}; got {describe(k)}")
    num_blocks, kv_heads, key_dim, _ = k.shape
    if not 1 <= key_dim <= _C.MAX_HEAD_DIM or not 1 <= kv.value_dim <= _C.MAX_HEAD_DIM or kv_heads < 1:
        raise ValueError(
            f"heads of 1 to {_C.MAX_HEAD_DIM} elements are supported, at least one of them; the cache has keys "
            f"{describe(k)} and values of {kv.value_dim}"
        )
    padded_dim = -(-kv.value_dim // BLOCK_SIZE) * BLOCK_SIZE
    if v.shape != (num_blocks, kv_heads, BLOCK_SIZE, padded_dim) or not _has_contiguous_heads(v, kv.v_scales):
        raise ValueError(
            f"cache values must be [{num_blocks}, {kv_heads}, {BLOCK_SIZE}, {padded_dim}], {_LAYOUT}; got {describe(v)}"
        )
    dtype = CACHE_DTYPES[k.dtype]
    return _C.KvView(
        k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), dtype, num_blocks, kv_heads, key_dim, kv.value_dim
    )


_LAYOUT = "each block contiguous, or in int8 each head with its scales right behind it"


def _has_contiguous_heads(blocks: Tensor, scales: Tensor | None) -> bool:
    """True if the heads of a block are adjacent, each followed by its scales if it has any. There may be gaps between
    blocks, for other layers' blocks, but no overlap."""
    if blocks.numel() == 0:
        return True
    num_blocks, heads, rows, columns = blocks.shape
    elements = rows * columns
    head = elements + (0 if scales is None else BLOCK_SIZE * scales.itemsize)
    block = max(blocks.stride(0), heads * head)
    if scales is not None:
        lies_behind = scales.dtype == torch.float32 and scales.data_ptr() == blocks.data_ptr() + elements
        fits = scales.shape == (num_blocks, heads, BLOCK_SIZE) and _has_strides(
            scales, block // scales.itemsize, head // scales.itemsize, 1
        )
        if not lies_behind or not fits:
            return False
    return _has_strides(blocks, block, head, columns, 1)


def _has_strides(tensor: Tensor, *expected: int) -> bool:
    """True if the strides match; the stride of a dimension of size 1 is ignored."""
    return all(size == 1 or stride == wanted for size, stride, wanted in zip(tensor.shape, tensor.stride(), expected))
