"""Copies of what the cache holds of a sequence, out of it and into it, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from pace.batch import BLOCK_SIZE, KVBlocks, KVSpec
from pace.llm.cache.block_pool import num_blocks_of
from pace.llm.cache.groups import first_kept, tables_of
from pace.llm.cache.manager import CacheManager
from pace.llm.cache.prefix_cache import NoPrefixCache
from pace.llm.cache.state_cache import StateCache
from pace.llm.sequence import Sequence

PIECE_BYTES = 8 << 20
"""Maximum bytes of a piece of several blocks. The engine's thread copies it within a few milliseconds."""
STATES, MARK = -1, -2
"""Groups of the pieces with states: after all tokens, and after the last full block."""


class Piece(NamedTuple):
    """Adjacent entries of a block table: blocks `start .. stop - 1` of one group of layers. Or all states, as one
    block."""

    group: int
    """Index into `KVSpec.groups`, or STATES or MARK."""
    start: int
    stop: int
    block_bytes: int
    """Bytes of the group's layers in a block, which has padding or room for a larger group after them."""

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.block_bytes


@dataclass(frozen=True)
class Extent:
    """What is copied of a sequence."""

    num_tokens: int
    """Number of computed positions."""
    starts: tuple[int, ...]
    """First block of each group of layers."""
    has_mark: bool = False
    """True if the states after the last full block are copied, too. Others can continue from there."""

    @classmethod
    def of(cls, cache: CacheManager, sequence: Sequence) -> Extent:
        """All that the cache holds of a sequence, and that is useful."""
        num_tokens, full = sequence.num_computed, sequence.num_computed // BLOCK_SIZE * BLOCK_SIZE
        starts = []
        for table, group in zip(tables_of(sequence, cache.num_groups), cache.spec.groups):
            start = first_kept(full, group.window)
            starts.append(
                start if table[start : start + 1] and table[start] >= 0 else first_kept(num_tokens, group.window)
            )
        return cls(num_tokens, tuple(starts), _mark_of(cache, sequence, full) >= 0 and full < num_tokens)

    def is_valid(self, spec: KVSpec) -> bool:
        """True if a sequence of a model with this cache may have it."""
        full = self.num_tokens // BLOCK_SIZE * BLOCK_SIZE
        ends = [(first_kept(full, group.window), first_kept(self.num_tokens, group.window)) for group in spec.groups]
        pairs = zip(self.starts, ends)
        fits = len(self.starts) == len(ends) and all(type(start) is int and start in end for start, end in pairs)
        return fits and (not self.has_mark or (spec.has_states and 0 < full < self.num_tokens))

    def pieces(self, spec: KVSpec) -> Iterator[Piece]:
        """Yields the pieces, the states last."""
        stop = num_blocks_of(self.num_tokens)
        for number, (group, first) in enumerate(zip(spec.groups, self.starts)):
            if block_bytes := spec.content_bytes(group):
                step = max(1, PIECE_BYTES // block_bytes)
                for start in range(first, stop, step):
                    yield Piece(number, start, min(stop, start + step), block_bytes)
        if spec.has_states and self.num_tokens:
            for which in (MARK, STATES) if self.has_mark else (STATES,):
                yield Piece(which, 0, 1, spec.slots().state_bytes)


def read_piece(cache: CacheManager, sequence: Sequence, piece: Piece) -> np.ndarray | None:
    """Returns a copy of a piece of a computed sequence, uint8 `[blocks, block_bytes]`. Elements that no position of the
    sequence wrote are 0, as a block may still have those of another sequence. None if the cache has lost it."""
    if piece.group < 0:
        states, state = _states(cache), sequence.state
        assert not state.pending, f"the states of {sequence} are not complete"
        full = sequence.num_computed // BLOCK_SIZE * BLOCK_SIZE
        slot = state.slot if piece.group == STATES else _mark_of(cache, sequence, full)
        return None if slot < 0 else states.contents(slot).numpy()[None].copy()
    contents = np.ascontiguousarray(cache.pool.contents(_blocks(sequence, piece), piece.block_bytes))
    _clear(cache.spec, contents, piece, sequence.num_computed)
    return contents


def take_room(cache: CacheManager, sequence: Sequence, extent: Extent) -> bool:
    """Takes the room that a sequence without any needs for `extent`. Returns False and takes nothing if too little is
    free."""
    cache.kv  # noqa: B018 (allocates the memory)
    stop = num_blocks_of(extent.num_tokens)
    if not any(extent.starts):
        return cache.reserve(sequence, extent.num_tokens)
    num_blocks = sum(stop - start for start in extent.starts)
    if num_blocks > cache.num_free_blocks or cache.states.needed(sequence) > cache.states.num_free:
        return False
    cache.states.reserve(sequence)
    for table, start in zip(tables_of(sequence, cache.num_groups), extent.starts):
        table.extend([-1] * start)
        table.extend(cache.pool.take() for _ in range(start, stop))
    return True


def prepare_room(cache: CacheManager, sequence: Sequence, piece: Piece) -> None:
    """Makes the memory of a piece resident before `write_piece`. Any thread may call it, also if others have taken the
    room meanwhile."""
    for table in sequence.block_tables[piece.group :][:1] if piece.group >= 0 else ():
        cache.pool.populate([block for block in table[piece.start : piece.stop] if block >= 0])


def write_piece(cache: CacheManager, sequence: Sequence, piece: Piece, data: memoryview, num_tokens: int) -> None:
    """Writes a piece of a sequence of `num_tokens` computed positions to the room of `take_room`."""
    if piece.group == STATES:
        _states(cache).write(sequence, _tensor(data))
    elif piece.group == MARK:
        if not isinstance(cache.prefix, NoPrefixCache):
            place = num_tokens // BLOCK_SIZE * BLOCK_SIZE
            _states(cache).mark(sequence, place, _tensor(data))
    else:
        contents = np.frombuffer(data, np.uint8).reshape(-1, piece.block_bytes)
        cache.pool.fill(_blocks(sequence, piece), contents)


def enter_room(cache: CacheManager, sequence: Sequence, num_tokens: int) -> None:
    """Marks the first `num_tokens` positions as computed, once all pieces are written. Offers them to the prefix
    cache."""
    if not num_tokens:
        return
    if cache.has_states:
        _states(cache).restore(sequence, num_tokens)
        if num_tokens % BLOCK_SIZE == 0 and not isinstance(cache.prefix, NoPrefixCache):
            _states(cache).mark(sequence, num_tokens)
    sequence.num_computed = num_tokens
    cache.publish(sequence)


def _tensor(data: memoryview) -> torch.Tensor:
    """Views bytes, which may be none."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _states(cache: CacheManager) -> StateCache:
    assert isinstance(cache.states, StateCache)
    return cache.states


def _mark_of(cache: CacheManager, sequence: Sequence, num_tokens: int) -> int:
    """Slot of the mark after `num_tokens` tokens of a sequence; -1 if there is none."""
    points = cache.prefix.points(sequence, num_tokens) if cache.has_states else ()
    return next((point.slot for point in points if point.num_tokens == num_tokens), -1)


def _blocks(sequence: Sequence, piece: Piece) -> list[int]:
    return list(sequence.block_tables[piece.group][piece.start : piece.stop])


def _clear(spec: KVSpec, contents: np.ndarray, piece: Piece, num_tokens: int) -> None:
    """Sets elements to 0 that no position before `num_tokens` wrote.

    These are the end of the last block, and the padding of values."""
    rest = num_tokens - (piece.stop - 1) * BLOCK_SIZE
    of_group = replace(spec, groups=(spec.groups[piece.group],))
    for kv in of_group.views(torch.from_numpy(contents)):
        if not isinstance(kv, KVBlocks):
            continue
        kv.v[..., kv.value_dim :] = 0
        if rest < BLOCK_SIZE:
            kv.k[-1, ..., rest:] = 0
            kv.v[-1, :, rest:] = 0
            for scales in (kv.k_scales, kv.v_scales):
                if scales is not None:
                    scales[-1, :, rest:] = 0
