"""What one step hands to a model: flat tokens, where they stand, and where their keys and values live."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pace.memory import reserve

BLOCK_SIZE = 16
"""Positions in one key/value block; the kernels compute the scores of a block as one 16-wide product."""


@dataclass(frozen=True)
class KVSpec:
    """The cache that a model needs: `num_layers` times `num_kv_heads` keys and values of `head_dim` elements of `dtype`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def padded_head_dim(self) -> int:
        """`head_dim` rounded up to 16: the length of a row of values."""
        return -(-self.head_dim // BLOCK_SIZE) * BLOCK_SIZE

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values together."""
        row_elements = self.head_dim + self.padded_head_dim
        return self.num_layers * self.num_kv_heads * BLOCK_SIZE * row_elements * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> list[KVBlocks]:
        """One `KVBlocks` per layer, contents undefined (positions not yet stored are never read into a result)."""
        key_shape = (num_blocks, self.num_kv_heads, self.head_dim, BLOCK_SIZE)
        value_shape = (num_blocks, self.num_kv_heads, BLOCK_SIZE, self.padded_head_dim)
        return [
            KVBlocks(_reserve(key_shape, self.dtype), _reserve(value_shape, self.dtype)) for _ in range(self.num_layers)
        ]


def _reserve(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose pages get memory when they are written. Raises OSError where there are no addresses."""
    return torch.frombuffer(reserve(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


@dataclass(frozen=True)
class KVBlocks:
    """One layer's cache: `k [num_blocks, Hkv, D, 16]` and `v [num_blocks, Hkv, 16, Dp]`, Dp = D rounded up to 16."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Spans:
    """Which tokens belong together, and where their past is. All int32.

    Span s has the tokens `query_start[s] .. query_start[s + 1]`; its last token sits at position `kv_len[s] - 1`, and its
    position p lives in block `block_table[s, p // 16]`. Entries of the table beyond `kv_len` may hold anything.
    """

    query_start: torch.Tensor
    """`[S + 1]`, from 0 to T."""
    kv_len: torch.Tensor
    """`[S]`, keys visible to the last token of the span, itself included."""
    block_table: torch.Tensor
    """`[S, max_blocks]`."""


@dataclass(frozen=True)
class ForwardBatch:
    """One step of a model over T tokens of S spans; `forward(ops, batch)` returns the logits of `logit_rows`."""

    tokens: torch.Tensor
    """int64 `[T]`, token ids of all spans, one span after the other."""
    positions: torch.Tensor
    """int64 `[T]`, position of each token in its own sequence."""
    rope_lengths: torch.Tensor
    """int64 `[T]`, `max(prompt length, position + 1)`: what dynamic and longrope scaling look at, so that the angle of a
    token never depends on the chunk it came in."""
    spans: Spans
    slots: torch.Tensor
    """int64 `[T]`, `block * 16 + position % 16`: where the token's key and value are stored."""
    logit_rows: torch.Tensor
    """int64 `[R]`, ascending: the rows whose logits are wanted."""
    kv: list[KVBlocks]
    """One per layer; the forward writes the slots above and reads what the spans can see."""
