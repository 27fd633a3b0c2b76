"""Copies of what the cache holds of a sequence, out of it and into it, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from pace.batch import BLOCK_SIZE, KVBlocks, KVSpec
from pace.llm.cache.block_pool import num_blocks_of
from pace.llm.cache.groups import first_kept, tables_of
from pace.llm.cache.manager import CacheManager
from pace.llm.cache.state_cache import StateCache
from pace.llm.sequence import Sequence

PIECE_BYTES = 8 << 20
"""Maximum bytes of a piece of several blocks. The engine's thread copies it within a few milliseconds."""
STATES = -1
"""Group of the piece with the states."""


class Piece(NamedTuple):
    """Adjacent entries of a block table: blocks `start .. stop - 1` of one group of layers. Or all states, as one block
    of the group STATES."""

    group: int
    start: int
    stop: int
    block_bytes: int
    """Bytes of the group's layers in a block, which has padding or room for a larger group after them."""

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.block_bytes


def pieces_of(spec: KVSpec, num_tokens: int) -> Iterator[Piece]:
    """Yields the pieces of all that a sequence keeps after `num_tokens` positions."""
    stop = num_blocks_of(num_tokens)
    for number, group in enumerate(spec.groups):
        if block_bytes := spec.content_bytes(group):
            step = max(1, PIECE_BYTES // block_bytes)
            for start in range(first_kept(num_tokens, group.window), stop, step):
                yield Piece(number, start, min(stop, start + step), block_bytes)
    if spec.has_states and num_tokens:
        yield Piece(STATES, 0, 1, spec.slots().state_bytes)


def read_piece(cache: CacheManager, sequence: Sequence, piece: Piece) -> np.ndarray:
    """Returns a copy of a piece of a computed sequence, uint8 `[blocks, block_bytes]`. Elements that no position of the
    sequence wrote are 0, as a block may still have those of another sequence."""
    if piece.group == STATES:
        assert isinstance(cache.states, StateCache)
        return cache.states.contents(sequence).numpy()[None].copy()
    contents = cache.pool.contents(_blocks(sequence, piece))
    _clear(cache.spec, contents, piece, sequence.num_computed)
    return np.ascontiguousarray(contents[:, : piece.block_bytes])


def take_room(cache: CacheManager, sequence: Sequence, num_tokens: int) -> bool:
    """Takes the room that a sequence without any keeps after `num_tokens` positions, for `write_piece`. Returns False
    and takes nothing if too little is free."""
    cache.kv  # noqa: B018 (allocates the memory)
    groups, stop = cache.spec.groups, num_blocks_of(num_tokens)
    starts = [first_kept(num_tokens, group.window) for group in groups]
    if not any(starts):
        return cache.reserve(sequence, num_tokens)
    num_blocks = sum(stop - start for start in starts)
    if num_blocks > cache.num_free_blocks or cache.states.needed(sequence) > cache.states.num_free:
        return False
    cache.states.reserve(sequence)
    for table, start in zip(tables_of(sequence, len(groups)), starts):
        table.extend([-1] * start)
        table.extend(cache.pool.take() for _ in range(start, stop))
    return True


def write_piece(cache: CacheManager, sequence: Sequence, piece: Piece, data: bytearray) -> None:
    """Writes a piece to the room of `take_room`."""
    if piece.group == STATES:
        assert isinstance(cache.states, StateCache)
        cache.states.write(sequence, torch.frombuffer(data, dtype=torch.uint8))
    else:
        contents = np.frombuffer(data, np.uint8).reshape(-1, piece.block_bytes)
        cache.pool.fill(_blocks(sequence, piece), contents)


def enter_room(cache: CacheManager, sequence: Sequence, num_tokens: int) -> None:
    """Marks the first `num_tokens` positions as computed; all their pieces are written. Offers them to the prefix
    cache."""
    if num_tokens:
        cache.states.restore(sequence, num_tokens)
        sequence.num_computed = num_tokens
        cache.publish(sequence)


def _blocks(sequence: Sequence, piece: Piece) -> list[int]:
    return list(sequence.block_tables[piece.group][piece.start : piece.stop])


def _clear(spec: KVSpec, contents: np.ndarray, piece: Piece, num_tokens: int) -> None:
    """Sets elements to 0 that no position before `num_tokens` wrote: the end of the last block, and the padding of
    values."""
    rest = num_tokens - (piece.stop - 1) * BLOCK_SIZE
    for kv in spec.views(torch.from_numpy(contents)):
        if not isinstance(kv, KVBlocks) or kv.group != piece.group:
            continue
        kv.v[..., kv.value_dim :] = 0
        if rest < BLOCK_SIZE:
            kv.k[-1, ..., rest:] = 0
            kv.v[-1, :, rest:] = 0
            for scales in (kv.k_scales, kv.v_scales):
                if scales is not None:
                    scales[-1, :, rest:] = 0
