"""How a sequence's room in the cache grows: block by block from anywhere, with a window that leaves blocks behind or
without, or as one run that moves when it is too short.

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
from pace.llm.cache.groups import first_kept, give_back_before, most_kept, tables_of
from pace.llm.sequence import Sequence

COPY_COST = 3.0
"""Seconds to copy a byte of the cache over seconds in which decode attention reads one: copying reads and writes, on
one thread. `benchmarks/cache.py` measures it."""


class BlockAllocator(Protocol):
    """Decides which blocks of the pool a sequence gets. Changes its block tables, and content only where it moves."""

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks without which `admit` fails."""
        ...

    def admit(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for the sequence to be computed up to `num_tokens` in steps, each of which reserves what it
        writes; False as `reserve`."""
        return self.reserve(sequence, num_tokens)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for positions `num_computed .. num_tokens - 1` of the sequence to be written; False, and nothing
        changed, where there is none. What others hold as well is left to them, and copied. A sequence that is alone in
        the pool can have all of it."""
        ...

    def check_layout(self, block_table: array) -> None:
        """Raises AssertionError for blocks that do not lie as the allocator lays them."""
        ...


class Paged(BlockAllocator):
    """Blocks from anywhere, taken when they are needed. The copy of a shared block is all that is ever copied."""

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
    """Blocks from anywhere, taken when they are needed, by a table for each group of layers. Those that no later
    position of its layers sees are given back before others are taken."""

    def __init__(self, pool: BlockPool, step_tokens: int) -> None:
        """`step_tokens`: positions that are computed between two calls of `reserve`, at most."""
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
        """Blocks in the table of each group with which all steps up to `num_tokens` find room: a table with a window
        gives back as many as it takes from then on. Those that other sequences hold too free no room when it gives them
        back, so it gets as many more."""
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
        """Free blocks that each group takes until its table has so many entries, and none to be written is shared."""
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
        table = sequence.block_table
        return num_blocks_of(num_tokens) <= len(table) and not shared_and_written(
            self.pool, table, sequence.num_computed
        )

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


def shared_and_written(pool: BlockPool, table: array, num_computed: int) -> list[int]:
    """Indices in a block table, from the first position not computed on, of blocks that others rely on too."""
    return [index for index in range(num_computed // BLOCK_SIZE, len(table)) if pool.is_shared(table[index])]


def copy_shared(pool: BlockPool, table: array, shared: list[int], num_computed: int) -> None:
    """Puts blocks of the sequence's own in the place of shared ones, with what is computed in them."""
    for index in shared:
        old, new = table[index], pool.take()
        if index * BLOCK_SIZE < num_computed:
            pool.copy(old, new)
        table[index] = new
        pool.give_back(old)
