"""What one step hands to a model: flat tokens, where they stand, and where their keys and values live."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

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
class Positions:
    """A layer that keeps a key and a value of every position, for each of `kv_heads` heads."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """How many positions back the layer's attention sees, its own included; None for all. The only place that says
    so."""
    chunked: bool = False
    """Whether positions fall into chunks of `window`, and each sees no further back than its own begins."""

    @property
    def parts(self) -> tuple[Part, ...]:
        padded_value = -(-self.value_dim // BLOCK_SIZE) * BLOCK_SIZE
        return Part(self.kv_heads, self.key_dim, BLOCK_SIZE), Part(self.kv_heads, BLOCK_SIZE, padded_value)

    def blocks(self, parts: list[tuple[Tensor, Tensor | None]]) -> KVBlocks:
        (keys, key_scales), (values, value_scales) = parts
        return KVBlocks(keys, values, key_scales, value_scales, self.value_dim)


@dataclass(frozen=True)
class Latent:
    """A layer that keeps one latent vector of `rank` elements a position, which all heads expand to their keys and
    values, and the `rope_dim` elements of the one key that is rotated."""

    rank: int
    rope_dim: int

    @property
    def positions(self) -> Positions:
        """How they lie: the rotated part as the key, and the latent as the value, of one head."""
        return Positions(1, self.rope_dim, self.rank)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.positions.parts

    def blocks(self, parts: list[tuple[Tensor, Tensor | None]]) -> KVBlocks:
        return self.positions.blocks(parts)


LayerCache = Positions | Latent | None
"""What one layer keeps of a sequence; None for a layer without memory."""


class Part(NamedTuple):
    """What one layer keeps of a block: a matrix for each of its heads, in int8 with 16 float32 scales behind each."""

    heads: int
    rows: int
    columns: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the part in one block."""
        return self.heads * (self.rows * self.columns * dtype.itemsize + scale_bytes(dtype))

    def cut(self, memory: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The elements `[num_blocks, heads, rows, columns]` and the scales `[num_blocks, heads, 16]` in one layer's
        bytes `[num_blocks, num_bytes]`."""
        heads = memory.unflatten(1, (self.heads, -1))
        num_bytes = heads.shape[2] - scale_bytes(dtype)
        elements = heads[..., :num_bytes].view(dtype).unflatten(2, (self.rows, self.columns))
        return elements, heads[..., num_bytes:].view(torch.float32) if scale_bytes(dtype) else None


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes of the scales behind the elements of one head in one block."""
    return BLOCK_SIZE * torch.float32.itemsize if dtype == torch.int8 else 0


class Group(NamedTuple):
    """Layers that keep the same positions of a sequence, and find them by one block table."""

    layers: tuple[int, ...]
    window: int | None
    """Positions back that any of them sees, its own included; older ones need not be kept. None for all."""


@dataclass(frozen=True)
class KVSpec:
    """The cache that a model needs, layer by layer, in elements of `dtype`: a float dtype, or int8, in which each head
    of each position has a float32 scale for its key and one for its value."""

    layers: tuple[LayerCache, ...]
    dtype: torch.dtype
    groups: tuple[Group, ...] = ()
    """A block holds 16 positions of the layers of one of them. They have the same bytes, so that any group can have any
    block. By default one group of all layers, which keeps every position."""

    def __post_init__(self) -> None:
        if not any(self.layers):
            raise ValueError(f"a cache needs a layer that keeps something; got {self.layers}")
        if not self.groups:
            object.__setattr__(self, "groups", (Group(tuple(range(len(self.layers))), None),))

    @property
    def position_bytes(self) -> int:
        """Bytes of one position over all layers, keys, values and their scales together."""
        return sum(sum(self._part_bytes(group)) for group in self.groups) // BLOCK_SIZE

    @property
    def group_bytes(self) -> int:
        """Bytes of one position over the layers of the largest group."""
        return max(sum(self._part_bytes(group)) for group in self.groups) // BLOCK_SIZE

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of positions, with what keeps blocks out of each other's way."""
        num_bytes = BLOCK_SIZE * self.group_bytes
        return num_bytes + (BLOCK_PADDING if num_bytes % CACHE_WAY_BYTES == 0 else 0)

    def _part_bytes(self, group: Group) -> list[int]:
        """Bytes in one block of the parts of a group's layers, in order."""
        layers = [self.layers[index] for index in group.layers]
        return [part.num_bytes(self.dtype) for layer in layers if layer for part in layer.parts]

    def allocate(self, num_blocks: int) -> list[LayerBlocks]:
        """The blocks of each layer, in memory of their own; see `reserve`."""
        return self.views(self.reserve(num_blocks))

    def reserve(self, num_blocks: int) -> Tensor:
        """uint8 `[num_blocks, block_bytes]`, contents undefined (positions not yet stored are never read into a
        result).

        Memory is taken when a position is written, and a block's keys and values of its layers lie together: so the
        cache can be on huge pages and yet grow with the sequence, and a block is copied at once. On pages of 4 KB
        decode attention took up to 1.4 times as long.
        Raises OSError where there are no addresses."""
        memory = reserve(num_blocks * self.block_bytes, huge_pages=True)
        return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, self.block_bytes)

    def views(self, memory: Tensor) -> list[LayerBlocks]:
        """The blocks of each layer: views of `memory`, which is as `reserve` gives it. Layers of different groups share
        it."""
        kv: list[LayerBlocks] = [None] * len(self.layers)
        for number, group in enumerate(self.groups):
            lengths = self._part_bytes(group)
            pieces = iter(memory.split([*lengths, memory.shape[1] - sum(lengths)], dim=1))
            for index in group.layers:
                if layer := self.layers[index]:
                    blocks = layer.blocks([part.cut(next(pieces), self.dtype) for part in layer.parts])
                    kv[index] = replace(blocks, group=number)
        return kv


@dataclass(frozen=True)
class KVBlocks:
    """The cache of a layer: `k [num_blocks, Hkv, D, 16]` and `v [num_blocks, Hkv, 16, Dp]`, Dp = the
    width of a value rounded up to 16.

    In int8 an element stands for itself times its position's scale, in float32 `[num_blocks, Hkv, 16]`; the scales of a
    head of a block lie right behind its elements, so that they are read with them."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    value_dim: int = 0
    """Elements of a value; 0 for as many as a key has."""
    group: int = 0
    """Of `KVSpec.groups`, that of the layer: which of the step's slots and block tables are its."""

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.k.shape[2])

    @property
    def tensors(self) -> list[Tensor]:
        """All there are; the first dimension counts blocks."""
        return [tensor for tensor in (self.k, self.v, self.k_scales, self.v_scales) if tensor is not None]


LayerBlocks = KVBlocks | None
"""The cache of one layer; None for a layer without memory."""


@dataclass(frozen=True)
class Spans:
    """Which tokens belong together, and where their past is. All int32.

    Span s has the tokens `query_start[s] .. query_start[s + 1]`; its last token sits at position `kv_len[s] - 1`, and
    its position p lives in block `block_table[s, p // 16]`. Entries of the table beyond `kv_len` may hold anything, and so
    may those of blocks that the windows of all its tokens have left behind.
    """

    query_start: Tensor
    """`[S + 1]`, from 0 to T."""
    kv_len: Tensor
    """`[S]`, keys visible to the last token of the span, itself included."""
    block_table: Tensor
    """`[S, max_blocks]`."""


@dataclass(frozen=True)
class ForwardBatch:
    """One step of a model over T tokens of S spans; `forward(batch)` returns the logits of `logit_rows`."""

    tokens: Tensor
    """int64 `[T]`, token ids of all spans, one span after the other."""
    positions: Tensor
    """int64 `[T]`, position of each token in its own sequence."""
    rope_lengths: Tensor
    """int64 `[T]`, `max(prompt length, position + 1)`: what dynamic and longrope scaling look at, so that the angle of
    a token never depends on the chunk it came in."""
    spans: Spans
    slots: Tensor
    """int64 `[T]`, `block * 16 + position % 16`: where the token's key and value are stored."""
    logit_rows: Tensor
    """int64 `[R]`, ascending: the rows whose logits are wanted."""
    kv: list[LayerBlocks]
    """One per layer; the forward writes the slots above and reads what the spans can see."""
    others: tuple[ForwardBatch, ...] = ()
    """The same step for the groups of layers after the first, which have other slots and block tables."""

    def of_layer(self, kv: LayerBlocks) -> ForwardBatch:
        """The batch with the slots and the block table of a layer that has these blocks."""
        return self.others[kv.group - 1] if kv and kv.group else self
