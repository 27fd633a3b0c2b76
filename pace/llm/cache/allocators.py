"""How a sequence's room in the cache grows: block by block from anywhere, or as one run that moves when it is too
short.

Attention looks at blocks through a table and reads no position beyond a sequence's length, so the allocators differ in
what is copied and how much room is spare, and in nothing else: docs/cache.md has the costs.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable
from typing import Protocol

from pace.batch import BLOCK_SIZE
from pace.llm.cache.block_pool import BlockPool, num_blocks_of
from pace.llm.sequence import Sequence

COPY_COST = 3.0
"""Seconds to copy a byte of the cache over seconds in which decode attention reads one: copying reads and writes, on
one thread. `benchmarks/cache.py` measures it."""


class BlockAllocator(Protocol):
    """Decides which blocks of the pool a sequence gets. Changes `sequence.block_table`, and content only where it
    moves."""

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks without which `reserve` fails."""
        ...

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for positions `num_computed .. num_tokens - 1` of the sequence to be written; False, and nothing
        changed, where there is none. What others hold as well is left to them, and copied. A sequence that is alone in
        the pool can have all of it."""
        ...

    def check_layout(self, block_table: array) -> None:
        """Raises AssertionError for blocks that do not lie as the allocator lays them."""
        ...


class Paged:
    """Blocks from anywhere, taken when they are needed. The copy of a shared block is all that is ever copied."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, num_blocks_of(num_tokens) - len(sequence.block_table)) + len(
            shared_and_written(self.pool, sequence)
        )

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        pool, table = self.pool, sequence.block_table
        shared = shared_and_written(pool, sequence)
        num_missing = max(0, num_blocks_of(num_tokens) - len(table))
        if num_missing + len(shared) > pool.num_free:
            return False
        for index in shared:
            old, new = table[index], pool.take()
            if index * BLOCK_SIZE < sequence.num_computed:
                pool.copy(old, new)
            table[index] = new
            pool.give_back(old)
        for _ in range(num_missing):
            table.append(pool.take())
        return True

    def check_layout(self, block_table: array) -> None:
        assert len(set(block_table)) == len(block_table), f"a block is in one table twice: {list(block_table)}"


class Contiguous:
    """Every sequence has one run of adjacent blocks. Where that is too short, or its end is shared, the sequence is
    copied once into a new run, with rows to spare for what comes; until these are used up it grows in place, drafts
    included.

    Balancing Memory and Compute (BMC, arXiv 2511.12031) with r spare rows; with r = 1 it is the growing by what is
    needed that it is compared to ("dynamic"), where a row is a block of 16 positions at the least.
    """

    def __init__(self, pool: BlockPool, spare_rows: Callable[[int], int]) -> None:
        """`spare_rows(n)`: new rows, at least 1, for a sequence that wants its n-th position and has no room for it."""
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
        # Spare rows are a convenience: where there is no room for them, what is needed will do.
        return any(
            self._move(sequence, size) or self._widen(sequence, size)
            for size in (num_blocks_of(longest), num_blocks_of(num_tokens))
        )

    def check_layout(self, block_table: array) -> None:
        assert all(after == before + 1 for before, after in itertools.pairwise(block_table)), (
            f"blocks do not lie side by side: {list(block_table)}"
        )

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        return num_blocks_of(num_tokens) <= len(sequence.block_table) and not shared_and_written(self.pool, sequence)

    def _is_shared(self, sequence: Sequence) -> bool:
        return any(map(self.pool.is_shared, sequence.block_table))

    def _move(self, sequence: Sequence, num_blocks: int) -> bool:
        """Copies what is computed to a new run of so many blocks."""
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
        """Makes the run so long by taking free blocks next to it, those above first; if it needs some below, the
        sequence slides down."""
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
        ):  # upwards: a block's new place was left before
            pool.copy(old[index], first + index)
        sequence.block_table = array("i", range(first, first + num_blocks))
        return True


def balanced_rows(num_tokens: int) -> int:
    """The r of BMC for a sequence of n tokens: `sqrt(2 c n)`, with c = COPY_COST, in whole blocks.

    A copy of n rows every r tokens costs c / r of the time that attention reads these rows in; r / 2 rows are spare on
    average, which is r / 2n of the sequence's own. Their sum is least there. Derived in docs/cache.md."""
    return BLOCK_SIZE * num_blocks_of(math.isqrt(int(2 * COPY_COST * num_tokens)))


def shared_and_written(pool: BlockPool, sequence: Sequence) -> list[int]:
    """Indices in the block table, from the first position not computed on, of blocks that others rely on too."""
    table = sequence.block_table
    return [index for index in range(sequence.num_computed // BLOCK_SIZE, len(table)) if pool.is_shared(table[index])]
