"""The input of one step of a model: flat tokens, their positions, and where their keys and values are cached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from pace.memory import reserve
from pace.states import SlotSpec, State, StateSlots, StateSpans

BLOCK_SIZE = 16
"""Positions in one key/value block. The kernels compute the scores of a block as one 16-wide product."""

NOT_FOUND = -2
"""Index of a largest logit that a step did not look for."""

CACHE_WAY_BYTES = 64 << 10
"""Blocks a multiple of this apart compete for the same few sets of the caches and the TLB, and evict each other."""
BLOCK_PADDING = 4096 + 64
"""A page and a cache line. Attention at 16k positions of a 1B shape read 14.3 GB/s with it on one thread, 10.9 GB/s
without (avx2 on Zen 4)."""


EMPTY_BLOCK_BYTES = 64
"""Bytes of a block of a model whose layers only have states."""


@dataclass(frozen=True)
class Positions:
    """A layer that keeps a key and a value for every position and each of `kv_heads` heads."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Number of positions that the layer's attention sees, the current one included; None for all. This is the only
    place that states it."""
    chunked: bool = False
    """True if positions are split into chunks of `window`: attention then sees back to the start of its own chunk
    only."""

    @property
    def parts(self) -> tuple[Part, ...]:
        padded_value = -(-self.value_dim // BLOCK_SIZE) * BLOCK_SIZE
        return Part(self.kv_heads, self.key_dim, BLOCK_SIZE), Part(self.kv_heads, BLOCK_SIZE, padded_value)

    def blocks(self, parts: list[tuple[Tensor, Tensor | None]]) -> KVBlocks:
        (keys, key_scales), (values, value_scales) = parts
        return KVBlocks(keys, values, key_scales, value_scales, self.value_dim)


@dataclass(frozen=True)
class Latent:
    """A layer that keeps one latent vector of `rank` elements per position, and the `rope_dim` elements of the one
    rotated key. All heads expand the latent vector to their keys and values."""

    rank: int
    rope_dim: int

    @property
    def positions(self) -> Positions:
        """The storage layout: one head, with the rotated part as the key and the latent as the value."""
        return Positions(1, self.rope_dim, self.rank)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.positions.parts

    def blocks(self, parts: list[tuple[Tensor, Tensor | None]]) -> KVBlocks:
        return self.positions.blocks(parts)


@dataclass(frozen=True)
class Shares:
    """A layer that keeps nothing of its own, and sees the keys and values of another layer."""

    layer: int
    """Index of that layer in `KVSpec.layers`, before its own."""


LayerCache = Positions | Latent | State | Shares | None
"""The cache contents of one layer; None for a layer without a cache."""


def keeps_positions(layer: LayerCache) -> TypeGuard[Positions | Latent]:
    """True for a layer that keeps something for every position."""
    return isinstance(layer, (Positions, Latent))


class Part(NamedTuple):
    """One layer's matrix in a block, for each head. In int8, 16 float32 scales follow each matrix."""

    heads: int
    rows: int
    columns: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the part in one block."""
        return self.heads * (self.rows * self.columns * dtype.itemsize + scale_bytes(dtype))

    def cut(self, memory: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Splits one layer's bytes `[num_blocks, num_bytes]` into elements `[num_blocks, heads, rows, columns]` and
        scales `[num_blocks, heads, 16]`."""
        heads = memory.unflatten(1, (self.heads, -1))
        num_bytes = heads.shape[2] - scale_bytes(dtype)
        elements = heads[..., :num_bytes].view(dtype).unflatten(2, (self.rows, self.columns))
        return elements, heads[..., num_bytes:].view(torch.float32) if scale_bytes(dtype) else None


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes of the scales that follow the elements of one head in one block."""
    return BLOCK_SIZE * torch.float32.itemsize if dtype == torch.int8 else 0


class Group(NamedTuple):
    """Layers that keep the same positions of a sequence and share one block table."""

    layers: tuple[int, ...]
    window: int | None
    """Largest number of positions that any layer of the group sees, the current one included; older positions need not
    be kept. None for all."""


@dataclass(frozen=True)
class KVSpec:
    """The cache that a model needs, layer by layer. `dtype` is a float dtype or int8; int8 has one float32 scale per
    head and position for keys, and one for values."""

    layers: tuple[LayerCache, ...]
    dtype: torch.dtype
    groups: tuple[Group, ...] = ()
    """Groups of layers. A block holds 16 positions of the layers of one group. All blocks have the same size, so any
    group can use any block. The default is one group of all layers, which keeps every position."""
    kept_before: int = 0
    """Number of positions before a layer's window that are kept as well, because a drafter sees them."""

    def __post_init__(self) -> None:
        if not any(layer and not isinstance(layer, Shares) for layer in self.layers):
            raise ValueError(f"a cache needs a layer that keeps something; got {self.layers}")
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Shares) and not keeps_positions(self.layers[layer.layer]):
                raise ValueError(f"layer {index} can only share keys and values that layer {layer.layer} keeps")
        if not self.groups:
            object.__setattr__(self, "groups", (Group(tuple(range(len(self.layers))), None),))

    def slots(self, journal_rows: int = 0) -> SlotSpec:
        """The layout of the states of a sequence. `journal_rows` is the maximum number of its drafts in a step."""
        states = tuple(layer if isinstance(layer, State) else None for layer in self.layers)
        return SlotSpec(states, torch.float64 if self.dtype == torch.float64 else torch.float32, journal_rows)

    @property
    def has_states(self) -> bool:
        return any(isinstance(layer, State) for layer in self.layers)

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
        """Bytes of one block, including the padding that keeps blocks from competing for cache sets. In a model without
        attention a block has no content: it is a place in the index of prefixes."""
        num_bytes = BLOCK_SIZE * self.group_bytes or EMPTY_BLOCK_BYTES
        return num_bytes + (BLOCK_PADDING if num_bytes % CACHE_WAY_BYTES == 0 else 0)

    def content_bytes(self, group: Group) -> int:
        """Bytes of the layers of a group in one block. The rest of the block is not used."""
        return sum(self._part_bytes(group))

    def _part_bytes(self, group: Group) -> list[int]:
        """Bytes of each part of each layer of the group in one block, in order."""
        layers = [self.layers[index] for index in group.layers]
        return [part.num_bytes(self.dtype) for layer in layers if keeps_positions(layer) for part in layer.parts]

    def allocate(self, num_blocks: int) -> list[LayerBlocks]:
        """Reserves new memory and returns the blocks of each layer; see `reserve`."""
        return self.views(self.reserve(num_blocks))

    def reserve(self, num_blocks: int) -> Tensor:
        """Reserves uint8 `[num_blocks, block_bytes]` with undefined contents; positions that were not stored never
        affect a result.

        Memory becomes resident when a position is written. The keys and values of all layers of a block are adjacent.
        The cache can therefore use huge pages and still grow with the sequence, and a block is copied in one piece.
        With 4 KB pages, decode attention took up to 1.4 times as long. Raises OSError if no address space is left."""
        memory = reserve(num_blocks * self.block_bytes, huge_pages=True)
        return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, self.block_bytes)

    def views(self, memory: Tensor) -> list[LayerBlocks]:
        """Views of `memory` (from `reserve`) as the blocks of each layer; None for a layer with a state. Layers of
        different groups share the memory. A layer that shares keys and values has the views of the other layer."""
        kv: list[LayerBlocks] = [None] * len(self.layers)
        for number, group in enumerate(self.groups):
            lengths = self._part_bytes(group)
            pieces = iter(memory.split([*lengths, memory.shape[1] - sum(lengths)], dim=1))
            for index in group.layers:
                layer = self.layers[index]
                if keeps_positions(layer):
                    blocks = layer.blocks([part.cut(next(pieces), self.dtype) for part in layer.parts])
                    kv[index] = replace(blocks, group=number)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Shares):
                kv[index] = kv[layer.layer]
        return kv


@dataclass(frozen=True)
class KVBlocks:
    """The cache of a layer: `k [num_blocks, Hkv, D, 16]` and `v [num_blocks, Hkv, 16, Dp]`. Dp is the width of a value
    rounded up to 16.

    In int8, the true value is the element times the scale of its position, float32 `[num_blocks, Hkv, 16]`. The scales
    of a head of a block directly follow its elements, so that both are read together."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    value_dim: int = 0
    """Elements of a value; 0 for the width of a key."""
    group: int = 0
    """Index into `KVSpec.groups`. Selects this layer's slots and block table."""

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.k.shape[2])

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache; their first dimension is the block."""
        return [tensor for tensor in (self.k, self.v, self.k_scales, self.v_scales) if tensor is not None]


LayerBlocks = KVBlocks | StateSlots | None
"""The cache of one layer; None for a layer without memory."""


@dataclass(frozen=True)
class Spans:
    """The token ranges of a step, one per sequence, their block tables, and what their tokens see. All int32.

    Span s has the tokens `query_start[s] .. query_start[s + 1]`. Its last token is at position `kv_len[s] - 1`, and its
    position p is in block `block_table[s, p // 16]`. Entries of the table beyond `kv_len` may hold any value. So may
    entries of blocks that no token of the span can see through its window.
    """

    query_start: Tensor
    """`[S + 1]`, from 0 to T."""
    kv_len: Tensor
    """`[S]`, number of positions of the span's sequence up to its last token, which is included."""
    block_table: Tensor
    """`[S, max_blocks]`."""
    newest: Tensor | None = None
    """`[T]`: token t sees positions up to `newest[t]`, which is included. None: each token sees up to its own position.

    The newest position may be before or after the token's own. It is at least the oldest position that the token sees,
    and less than the `kv_len` of its span."""
    oldest: Tensor | None = None
    """`[T]`: token t sees positions from `oldest[t]` on, even if a layer's window begins later. None: no token sees
    more than a window."""


@dataclass(frozen=True)
class GivenRows:
    """Rows of floats that stand in for rows of a step, such as rows of images in place of embeddings."""

    rows: Tensor
    """float32 `[G, W]`. A model reads ranges of its columns."""
    at: Tensor
    """int64 `[G]`, ascending: the rows of the step that they stand for."""


@dataclass(frozen=True)
class ForwardBatch:
    """One step of a model over T tokens of S spans; `forward(batch)` returns the logits of `logit_rows`."""

    tokens: Tensor
    """int64 `[T]`, token ids of all spans, concatenated."""
    positions: Tensor
    """int64 `[T]`, position of each token in its own sequence."""
    rope_lengths: Tensor
    """int64 `[T]`, `max(prompt length, position + 1)`. Dynamic and longrope scaling use this length, so that the angle
    of a token never depends on the chunk it was computed in."""
    spans: Spans
    slots: Tensor
    """int64 `[T]`, `block * 16 + position % 16`: where the token's key and value are stored."""
    logit_rows: Tensor
    """int64 `[R]`, ascending: the rows whose logits are returned."""
    kv: list[LayerBlocks]
    """One per layer. The forward pass writes the slots above and reads what the spans can see."""
    given: GivenRows | None = None
    """Rows that the step does not compute from token ids. None: no such rows."""
    kept: Tensor | None = None
    """float32 `[T, W]`, written by a model with `taps`: rows of each token that a drafter reads. None: no such rows."""
    angle_positions: Tensor | None = None
    """int64 `[3, T]`, for a model that rotates by time, height and width: the three positions of each token. None: all
    three are `positions`."""
    states: StateSpans | None = None
    """The slots that the step reads and writes. None for a model without states."""
    routing: Tensor | None = None
    """float32 `[T, 2 k]`: the slots of up to k adapters of each token, -1 for none, then their weights. None: no token
    has an adapter."""
    types: Tensor | None = None
    """int64 `[T]`, the type of each token, for a model that has token types. None for others."""
    largest: Tensor | None = None
    """int64 `[R]`, written by a program: the index of each row's largest logit, as `argmax` gives it. NOT_FOUND if the
    program does not look for it. None: not wanted."""
    others: tuple[ForwardBatch, ...] = ()
    """The same step for the second and later groups of layers, with their slots and block tables."""

    def of_wanted_tokens(self, x: Tensor) -> tuple[ForwardBatch, Tensor]:
        """Returns the step of each span's tokens from the first one on whose logits are wanted. Its given rows are
        their rows of `x [T, W]`. Also returns the rows of these tokens in this step, int64 `[G]`. For layers that only
        see keys and values of earlier layers."""
        edges, wanted = self.spans.query_start.numpy(), self.logit_rows.numpy()
        starts, ends = edges[:-1], edges[1:]
        first = np.append(wanted, edges[-1])[np.searchsorted(wanted, starts)]
        lengths = np.maximum(ends - first, 0)
        edges = np.concatenate([[0], np.cumsum(lengths)])
        rows = torch.from_numpy(np.arange(edges[-1]) + np.repeat(ends - edges[1:], lengths))
        newest, oldest = self.spans.newest, self.spans.oldest
        spans = replace(
            self.spans,
            query_start=torch.from_numpy(edges.astype(np.int32)),
            newest=None if newest is None else newest[rows],
            oldest=None if oldest is None else oldest[rows],
        )
        some = replace(
            self,
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            rope_lengths=self.rope_lengths[rows],
            spans=spans,
            slots=self.slots[rows],
            logit_rows=torch.searchsorted(rows, self.logit_rows),
            given=GivenRows(x[rows], torch.arange(len(rows))),
            kept=None if self.kept is None else torch.empty(len(rows), self.kept.shape[1]),
            angle_positions=None if self.angle_positions is None else self.angle_positions[:, rows],
            routing=None if self.routing is None else self.routing[rows],
            types=None if self.types is None else self.types[rows],
            others=(),
        )
        others = (
            replace(some, spans=replace(spans, block_table=other.spans.block_table), slots=other.slots[rows])
            for other in self.others
        )
        return replace(some, others=tuple(others)), rows

    def of_layer(self, kv: LayerBlocks) -> ForwardBatch:
        """Returns the batch with the slots and block table of the layer that owns `kv`."""
        return self.others[kv.group - 1] if isinstance(kv, KVBlocks) and kv.group else self
