"""Allocators: paged blocks from anywhere, with or without windows, or one contiguous run that moves when it is too
short.

Attention finds blocks through a table and reads no position beyond a sequence's length. So the allocators differ only
in how much they copy and how much room is spare: docs/cache.md has the costs.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable
from typing import Protocol

from pace.batch import BLOCK_SIZE
from pace.llm.cache.block_pool import BlockPool, num_blocks_of
from pace.llm.cache.groups import first_kept, give_back_before, most_kept, tables_of
from pace.llm.sequence import Sequence

COPY_COST = 3.0
"""Seconds to copy a byte of the cache, divided by the seconds in which decode attention reads one. Copying reads and
writes, on one thread. `benchmarks/cache.py` measures it."""


class BlockAllocator(Protocol):
    """Decides which blocks of the pool a sequence gets. Changes its block tables, and copies content only when blocks
    move."""

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Number of free blocks that `admit` needs."""
        ...

    def admit(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room to compute the sequence up to `num_tokens`, in steps that each reserve what they write. Returns
        False as `reserve` does."""
        return self.reserve(sequence, num_tokens)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room to write positions `num_computed .. num_tokens - 1` of the sequence. Returns False and changes
        nothing if there is no room. Shared blocks are left to their other holders and copied. A sequence alone in the
        pool can have all of it."""
        ...

    def check_layout(self, block_table: array) -> None:
        """Raises AssertionError if the blocks do not have this allocator's layout."""
        ...


class Paged(BlockAllocator):
    """Blocks from anywhere, taken when needed. Copies only shared blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        table = sequence.block_table
        shared = shared_and_written(self.pool, table, sequence.num_computed)
        return max(0, num_blocks_of(num_tokens) - len(table)) + len(shared)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        pool, table = self.pool, sequence.block_table
        shared = shared_and_written(pool, table, sequence.num_computed)
        num_missing = max(0, num_blocks_of(num_tokens) - len(table))
        if num_missing + len(shared) > pool.num_free:
            return False
        copy_shared(pool, table, shared, sequence.num_computed)
        for _ in range(num_missing):
            table.append(pool.take())
        return True

    def check_layout(self, block_table: array) -> None:
        assert len(set(block_table)) == len(block_table), f"a block is in one table twice: {list(block_table)}"


class Windowed(BlockAllocator):
    """Blocks from anywhere, taken when needed, with a table for each group of layers. Blocks that no later position of
    its layers sees are given back before others are taken."""

    def __init__(self, pool: BlockPool, step_tokens: int) -> None:
        """`step_tokens` is the maximum of positions computed between two calls of `reserve`."""
        self.pool = pool
        self.windows = [group.window for group in pool.spec.groups]
        self.step_tokens = step_tokens

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        self._give_back_unseen(sequence)
        return sum(self._needed(sequence, self._admitted(sequence, num_tokens)))

    def admit(self, sequence: Sequence, num_tokens: int) -> bool:
        return self._grow(sequence, self._admitted(sequence, num_tokens))

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        return self._grow(sequence, [num_blocks_of(num_tokens)] * len(self.windows))

    def check_layout(self, block_table: array) -> None:
        held = [block for block in block_table if block >= 0]
        assert len(set(held)) == len(held), f"a block is in one table twice: {list(block_table)}"
        assert list(block_table[len(block_table) - len(held) :]) == held, (
            f"a block was given back before those in front of it: {list(block_table)}"
        )

    def _admitted(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Number of table entries with which each group has room for all steps up to `num_tokens`. From then on, a
        table with a window gives back and takes equally many blocks. Blocks shared with other sequences free no room
        when given back, so one more is added for each."""
        needed, num_computed = num_blocks_of(num_tokens), sequence.num_computed
        ends = []
        for table, window in zip(tables_of(sequence, len(self.windows)), self.windows):
            if window is None:
                ends.append(needed)
                continue
            first = first_kept(num_computed, window)
            num_shared = sum(map(self.pool.has_other_holders, table[first : num_computed // BLOCK_SIZE]))
            ends.append(min(needed, first + most_kept(window, self.step_tokens) + num_shared))
        return ends

    def _needed(self, sequence: Sequence, ends: list[int]) -> list[int]:
        """Number of free blocks that each group needs until its table has `ends[group]` entries and no block to be
        written is shared."""
        return [
            max(0, end - len(table)) + len(shared_and_written(self.pool, table, sequence.num_computed))
            for table, end in zip(tables_of(sequence, len(ends)), ends)
        ]

    def _grow(self, sequence: Sequence, ends: list[int]) -> bool:
        self._give_back_unseen(sequence)
        pool, num_computed = self.pool, sequence.num_computed
        if sum(self._needed(sequence, ends)) > pool.num_free:
            return False
        for table, end in zip(sequence.block_tables, ends):
            copy_shared(pool, table, shared_and_written(pool, table, num_computed), num_computed)
            while len(table) < end:
                table.append(pool.take())
        return True

    def _give_back_unseen(self, sequence: Sequence) -> None:
        for table, window in zip(tables_of(sequence, len(self.windows)), self.windows):
            give_back_before(self.pool, table, first_kept(sequence.num_computed, window))


class Contiguous(BlockAllocator):
    """Gives each sequence one run of adjacent blocks. If the run is too short or its end is shared, the sequence is
    copied to a new run with spare rows. Until these are used up it grows in place, drafts included.

    This is Balancing Memory and Compute (BMC, arXiv 2511.12031) with r spare rows. r = 1 is that paper's baseline,
    which grows only as needed ("dynamic"); here it grows by a block of 16 positions at least.
    """

    def __init__(self, pool: BlockPool, spare_rows: Callable[[int], int]) -> None:
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
            f"blocks do not lie side by side: {list(block_table)}"
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
        """Extends the run to `num_blocks` with free blocks next to it, those above first. If it needs some below, the
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
        ):  # upwards: a block's new place was vacated before
            pool.copy(old[index], first + index)
        sequence.block_table = array("i", range(first, first + num_blocks))
        return True


def balanced_rows(num_tokens: int) -> int:
    """The r of BMC for a sequence of n tokens: `sqrt(2 c n)`, with c = COPY_COST, in whole blocks.

    Copying n rows every r tokens costs c / r of the time in which attention reads them. On average r / 2 rows are
    spare, which is r / 2n of the sequence's size. This r minimises the sum. Derived in docs/cache.md."""
    return BLOCK_SIZE * num_blocks_of(math.isqrt(int(2 * COPY_COST * num_tokens)))


def shared_and_written(pool: BlockPool, table: array, num_computed: int) -> list[int]:
    """Indices of blocks in the table, from the first position not computed on, that others rely on too."""
    return [index for index in range(num_computed // BLOCK_SIZE, len(table)) if pool.is_shared(table[index])]


def copy_shared(pool: BlockPool, table: array, shared: list[int], num_computed: int) -> None:
    """Replaces shared blocks of the table by own ones and copies their computed content."""
    for index in shared:
        old, new = table[index], pool.take()
        if index * BLOCK_SIZE < num_computed:
            pool.copy(old, new)
        table[index] = new
        pool.give_back(old)
