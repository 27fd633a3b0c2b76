"""Allocators of the paged cache: blocks from anywhere, with or without windows. `contiguous.py` has the allocator of
adjacent blocks.

Attention finds blocks through a table and reads no position beyond a sequence's length. So allocators differ only in
how much they copy and how much room is spare: docs/cache.md has the costs.
"""

from __future__ import annotations

from array import array
from typing import Protocol

from pace.batch import BLOCK_SIZE
from pace.llm.cache.block_pool import BlockPool, num_blocks_of
from pace.llm.cache.groups import first_kept, give_back_before, most_kept, tables_of
from pace.llm.sequence import Sequence


class BlockAllocator(Protocol):
    """Decides which blocks of the pool a sequence gets, and changes its block tables. Copies the content of blocks that
    are shared or must move."""

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Number of free blocks that `admit` needs."""
        ...

    def admit(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room to compute the sequence up to `num_tokens`, in steps that each reserve what they write. Returns
        False as `reserve` does."""
        return self.reserve(sequence, num_tokens)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room to write positions `num_computed .. num_tokens - 1` of the sequence. Returns False and changes
        nothing if there is no room. Shared blocks that will be written are replaced by copies. The only sequence in the
        pool can use all of it."""
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
        """`step_tokens` is the maximum number of positions computed between two calls of `reserve`."""
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
            f"a block was freed before the earlier blocks of its table: {list(block_table)}"
        )

    def _admitted(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Number of table entries that give each group room for all steps up to `num_tokens`. After that, a table with
        a window gives back as much as it takes. Blocks shared with other sequences free no room when given back, so one
        more is added for each."""
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


def shared_and_written(pool: BlockPool, table: array, num_computed: int) -> list[int]:
    """Indices of shared blocks in the table, from the block of the first position that is not computed."""
    return [index for index in range(num_computed // BLOCK_SIZE, len(table)) if pool.is_shared(table[index])]


def copy_shared(pool: BlockPool, table: array, shared: list[int], num_computed: int) -> None:
    """Replaces shared blocks of the table by new ones and copies their computed content."""
    for index in shared:
        old, new = table[index], pool.take()
        if index * BLOCK_SIZE < num_computed:
            pool.copy(old, new)
        table[index] = new
        pool.give_back(old)
