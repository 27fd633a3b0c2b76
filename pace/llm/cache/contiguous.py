"""The contiguous caches, "bmc" and "dynamic": each sequence has one run of adjacent blocks."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable

import numpy as np

from pace.batch import BLOCK_SIZE
from pace.llm.cache.allocators import BlockAllocator, shared_and_written
from pace.llm.cache.block_pool import BlockPool, num_blocks_of
from pace.llm.sequence import Sequence

COPY_COST = 3.0
"""Seconds to copy a byte of the cache, divided by the seconds in which decode attention reads one. Copying reads and
writes, on one thread."""


class RunPool(BlockPool):
    """A pool that finds and gives out runs of adjacent blocks. It keeps no idle blocks."""

    def find_run(self, num_blocks: int) -> int | None:
        """Returns the first block of the lowest run of `num_blocks` free blocks; None if there is no such run."""
        edges = np.concatenate(([-1], np.flatnonzero(self._references), [self.num_blocks]))
        (fitting,) = np.nonzero(np.diff(edges) > num_blocks)
        return int(edges[fitting[0]]) + 1 if len(fitting) else None

    def room_around(self, first: int, last: int) -> tuple[int, int]:
        """Returns the longest range [start, stop) that contains `first` .. `last` and otherwise only free blocks."""
        held = np.flatnonzero(self._references)
        below, above = held[held < first], held[held > last]
        return (int(below[-1]) + 1 if len(below) else 0), (int(above[0]) if len(above) else self.num_blocks)

    def take_these(self, blocks: range) -> None:
        """Takes `blocks` for one holder. All of them must be free and not idle."""
        while self.num_touched < blocks.stop:
            self._references.append(0)
            self.num_touched += 1
            self._free.append(self.num_touched - 1)
        self._free = [block for block in self._free if block not in blocks]
        for block in blocks:
            self._references[block] = 1


class Contiguous(BlockAllocator):
    """Gives each sequence one run of adjacent blocks. If the run is too short or its end is shared, the sequence is
    copied to a new run with spare rows. Until these are used up it grows in place, drafts included.

    This is Balancing Memory and Compute (BMC, arXiv 2511.12031) with r spare rows. r = 1 is that paper's baseline,
    which grows only as needed ("dynamic"); here it grows by a block of 16 positions at least.
    """

    def __init__(self, pool: RunPool, spare_rows: Callable[[int], int]) -> None:
        """`spare_rows(n)` is the number of new rows, at least 1, for a sequence that has no room for its n-th
        position."""
        self.pool = pool
        self.spare_rows = spare_rows

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        if self._has_room(sequence, num_tokens):
            return 0
        num_needed = num_blocks_of(num_tokens)
        return num_needed if self._is_shared(sequence) else num_needed - len(sequence.block_table)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        if self._has_room(sequence, num_tokens):
            return True
        longest = max(num_tokens, min(sequence.max_length, num_tokens - 1 + self.spare_rows(num_tokens)))
        # Spare rows are optional: without room for them, take only what is needed.
        return any(
            self._move(sequence, size) or self._widen(sequence, size)
            for size in (num_blocks_of(longest), num_blocks_of(num_tokens))
        )

    def check_layout(self, block_table: array) -> None:
        assert all(after == before + 1 for before, after in itertools.pairwise(block_table)), (
            f"the blocks of a run are not adjacent: {list(block_table)}"
        )

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        table = sequence.block_table
        return num_blocks_of(num_tokens) <= len(table) and not shared_and_written(
            self.pool, table, sequence.num_computed
        )

    def _is_shared(self, sequence: Sequence) -> bool:
        return any(map(self.pool.is_shared, sequence.block_table))

    def _move(self, sequence: Sequence, num_blocks: int) -> bool:
        """Copies the computed positions to a new run of `num_blocks` blocks."""
        pool, old = self.pool, sequence.block_table
        first = pool.find_run(num_blocks)
        if first is None:
            return False
        pool.take_these(range(first, first + num_blocks))
        if sequence.num_computed:
            pool.copy(old[0], first, num_blocks_of(sequence.num_computed))
        sequence.block_table = array("i", range(first, first + num_blocks))
        for block in reversed(old):
            pool.give_back(block)
        return True

    def _widen(self, sequence: Sequence, num_blocks: int) -> bool:
        """Extends the run to `num_blocks` with free blocks after it, then before it. If it needs blocks before it, the
        content moves down."""
        pool, old = self.pool, sequence.block_table
        if not old or self._is_shared(sequence):
            return False
        start, stop = pool.room_around(old[0], old[-1])
        if stop - start < num_blocks:
            return False
        first = min(old[0], stop - num_blocks)
        pool.take_these(range(first, old[0]))
        pool.take_these(range(old[-1] + 1, first + num_blocks))
        for index in range(
            num_blocks_of(sequence.num_computed) if first < old[0] else 0
        ):  # upwards: a block's new place was vacated before
            pool.copy(old[index], first + index)
        sequence.block_table = array("i", range(first, first + num_blocks))
        return True


def balanced_rows(num_tokens: int) -> int:
    """Returns the r of BMC for a sequence of n tokens: `sqrt(2 c n)`, with c = COPY_COST, in whole blocks.

    Copying n rows every r tokens costs c / r of the time in which attention reads them. On average r / 2 rows are
    spare, which is r / 2n of the sequence's size. This r minimises the sum. Derived in docs/cache.md."""
    return BLOCK_SIZE * num_blocks_of(math.isqrt(int(2 * COPY_COST * num_tokens)))
