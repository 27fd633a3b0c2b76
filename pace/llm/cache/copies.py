"""Copies of a sequence's blocks out of the cache and into it, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from pace.batch import BLOCK_SIZE, KVBlocks, KVSpec
from pace.llm.cache.block_pool import num_blocks_of
from pace.llm.cache.groups import first_kept, tables_of
from pace.llm.cache.manager import CacheManager
from pace.llm.sequence import Sequence

PIECE_BYTES = 8 << 20
"""Maximum bytes of a piece of several blocks. The engine's thread copies it within a few milliseconds."""


class Piece(NamedTuple):
    """Adjacent entries of a block table: blocks `start .. stop - 1` of one group of layers."""

    group: int
    start: int
    stop: int
    block_bytes: int
    """Bytes of the group's layers in a block, which has padding or room for a larger group after them."""

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.block_bytes


def pieces_of(spec: KVSpec, num_tokens: int) -> Iterator[Piece]:
    """Yields the pieces of all blocks that a sequence keeps after `num_tokens` positions."""
    stop = num_blocks_of(num_tokens)
    for number, group in enumerate(spec.groups):
        block_bytes = spec.content_bytes(group)
        if not block_bytes:
            continue
        step = max(1, PIECE_BYTES // block_bytes)
        for start in range(first_kept(num_tokens, group.window), stop, step):
            yield Piece(number, start, min(stop, start + step), block_bytes)


def take_room(cache: CacheManager, sequence: Sequence, num_tokens: int) -> bool:
    """Takes the blocks that a sequence without blocks keeps after `num_tokens` positions. Their contents are undefined,
    and `num_computed` stays 0. Returns False and takes nothing if the pool has too few free blocks."""
    groups, stop = cache.spec.groups, num_blocks_of(num_tokens)
    starts = [first_kept(num_tokens, group.window) for group in groups]
    if not any(starts):
        return cache.reserve(sequence, num_tokens)
    if sum(stop - start for start in starts) > cache.num_free_blocks:
        return False
    for table, start in zip(tables_of(sequence, len(groups)), starts):
        table.extend([-1] * start)
        table.extend(cache.pool.take() for _ in range(start, stop))
    return True


def read_piece(cache: CacheManager, sequence: Sequence, piece: Piece) -> np.ndarray | None:
    """Returns a copy of the blocks, uint8 `[blocks, block_bytes]`; None if the sequence has lost them. Elements that no
    position of the sequence wrote are 0, as a block may still have those of another sequence."""
    if not _holds(sequence, piece):
        return None
    cache.kv  # noqa: B018 (allocates the pool)
    contents = cache.pool.contents(sequence.block_tables[piece.group][piece.start : piece.stop])
    _clear(cache.spec, contents, piece, sequence.num_computed)
    return np.ascontiguousarray(contents[:, : piece.block_bytes])


def write_piece(cache: CacheManager, sequence: Sequence, piece: Piece, data: bytes) -> bool:
    """Writes blocks that `read_piece` returned to blocks of `take_room`. Returns False if the sequence has lost
    them."""
    if not _holds(sequence, piece):
        return False
    cache.kv  # noqa: B018
    contents = np.frombuffer(data, np.uint8).reshape(-1, piece.block_bytes)
    cache.pool.fill(sequence.block_tables[piece.group][piece.start : piece.stop], contents)
    return True


def _holds(sequence: Sequence, piece: Piece) -> bool:
    tables = sequence.block_tables
    return piece.group < len(tables) and len(tables[piece.group]) >= piece.stop


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
