"""What one step hands to a model: flat tokens, where they stand, and where their keys and values live."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pace.memory import reserve

BLOCK_SIZE = 16
"""Positions in one key/value block; the kernels compute the scores of a block as one 16-wide product."""

CACHE_WAY_BYTES = 64 << 10
"""Blocks that are a multiple of this apart fall into the same few sets of caches and TLB, which then hold only some of
them."""
BLOCK_PADDING = 4096 + 64
"""A page and a line: at 16k positions of 1B's shape attention read 14.3 GB/s with it on one thread, 10.9 without (avx2
on Zen 4)."""


@dataclass(frozen=True)
class KVSpec:
    """The cache that a model needs: `num_layers` times `num_kv_heads` keys and values of `head_dim` elements of
    `dtype`: a float dtype, or int8, in which each head of each position has a float32 scale for its key and one for its
    value."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def padded_head_dim(self) -> int:
        """`head_dim` rounded up to 16: the length of a row of values."""
        return -(-self.head_dim // BLOCK_SIZE) * BLOCK_SIZE

    @property
    def position_bytes(self) -> int:
        """Bytes of one position over all layers, keys, values and their scales together."""
        return self.num_layers * sum(self._part_bytes) // BLOCK_SIZE

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of positions, with what keeps blocks out of each other's way."""
        num_bytes = BLOCK_SIZE * self.position_bytes
        return num_bytes + (BLOCK_PADDING if num_bytes % CACHE_WAY_BYTES == 0 else 0)

    @property
    def _shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of one head's keys and values in one block."""
        return (self.head_dim, BLOCK_SIZE), (BLOCK_SIZE, self.padded_head_dim)

    @property
    def _scale_bytes(self) -> int:
        """Behind the keys, and behind the values, of one head in one block."""
        return BLOCK_SIZE * torch.float32.itemsize if self.dtype == torch.int8 else 0

    @property
    def _part_bytes(self) -> list[int]:
        """Of one layer's keys and values in one block, with their scales."""
        return [
            self.num_kv_heads * (math.prod(shape) * self.dtype.itemsize + self._scale_bytes) for shape in self._shapes
        ]

    def allocate(self, num_blocks: int) -> list[KVBlocks]:
        """One `KVBlocks` per layer, in memory of their own; see `reserve`."""
        return self.layers(self.reserve(num_blocks))

    def reserve(self, num_blocks: int) -> torch.Tensor:
        """uint8 `[num_blocks, block_bytes]`, contents undefined (positions not yet stored are never read into a
        result).

        Memory is taken when a position is written, and a block's keys and values of all layers lie together: so the
        cache can be on huge pages and yet grow with the text, and a block is copied at once. On pages of 4 KB decode
        attention took up to 1.4 times as long.
        Raises OSError where there are no addresses."""
        memory = reserve(num_blocks * self.block_bytes, huge_pages=True)
        return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, self.block_bytes)

    def layers(self, memory: torch.Tensor) -> list[KVBlocks]:
        """One `KVBlocks` per layer: views of `memory`, which is as `reserve` gives it."""
        lengths = self._part_bytes * self.num_layers
        parts = memory.split([*lengths, memory.shape[1] - sum(lengths)], dim=1)[: len(lengths)]
        (keys, key_scales), (values, value_scales) = (
            zip(*(self._cut(part, shape) for part in parts[i::2])) for i, shape in enumerate(self._shapes)
        )
        return [KVBlocks(*layer) for layer in zip(keys, values, key_scales, value_scales)]

    def _cut(self, part: torch.Tensor, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The heads of `shape` in one layer's bytes `[num_blocks, bytes]`, and the scales `[num_blocks, Hkv, 16]`
        behind each."""
        heads = part.unflatten(1, (self.num_kv_heads, -1))
        num_bytes = heads.shape[2] - self._scale_bytes
        elements = heads[..., :num_bytes].view(self.dtype).unflatten(2, shape)
        return elements, heads[..., num_bytes:].view(torch.float32) if self._scale_bytes else None


@dataclass(frozen=True)
class KVBlocks:
    """One layer's cache: `k [num_blocks, Hkv, D, 16]` and `v [num_blocks, Hkv, 16, Dp]`, Dp = D rounded up to 16.

    In int8 an element stands for itself times its position's scale, in float32 `[num_blocks, Hkv, 16]`; the scales of a
    head of a block lie right behind its elements, so that they are read with them."""

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All there are; the first dimension counts blocks."""
        return [tensor for tensor in (self.k, self.v, self.k_scales, self.v_scales) if tensor is not None]


@dataclass(frozen=True)
class Spans:
    """Which tokens belong together, and where their past is. All int32.

    Span s has the tokens `query_start[s] .. query_start[s + 1]`; its last token sits at position `kv_len[s] - 1`, and
    its position p lives in block `block_table[s, p // 16]`. Entries of the table beyond `kv_len` may hold anything.
    """

    query_start: torch.Tensor
    """`[S + 1]`, from 0 to T."""
    kv_len: torch.Tensor
    """`[S]`, keys visible to the last token of the span, itself included."""
    block_table: torch.Tensor
    """`[S, max_blocks]`."""


@dataclass(frozen=True)
class ForwardBatch:
    """One step of a model over T tokens of S spans; `forward(batch)` returns the logits of `logit_rows`."""

    tokens: torch.Tensor
    """int64 `[T]`, token ids of all spans, one span after the other."""
    positions: torch.Tensor
    """int64 `[T]`, position of each token in its own sequence."""
    rope_lengths: torch.Tensor
    """int64 `[T]`, `max(prompt length, position + 1)`: what dynamic and longrope scaling look at, so that the angle of
    a token never depends on the chunk it came in."""
    spans: Spans
    slots: torch.Tensor
    """int64 `[T]`, `block * 16 + position % 16`: where the token's key and value are stored."""
    logit_rows: torch.Tensor
    """int64 `[R]`, ascending: the rows whose logits are wanted."""
    kv: list[KVBlocks]
    """One per layer; the forward writes the slots above and reads what the spans can see."""
