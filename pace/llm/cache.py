"""Keys and values in blocks of 16 positions: who holds which block, and when it is free again."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from pace.llm.batch import BLOCK_SIZE, KVBlocks, KVSpec
from pace.llm.sequence import Sequence


class CacheManager:
    """A pool of blocks shared by all sequences of one model.

    The pool is one allocation for all layers, made at first use and as large as the budget; the operating system gives it memory
    only where a block is written, and blocks are handed out lowest first and reused last-freed first, so that what stays
    resident is the peak of what was in use.

    A block may belong to several sequences (`fork`); it is copied when one of them writes into it. The manager alone changes
    `sequence.block_table` and `sequence.num_computed`. Not thread-safe: the engine calls it under its lock.
    """

    def __init__(self, spec: KVSpec, budget_bytes: int) -> None:
        """Raises ValueError where the budget holds no block."""
        self.spec = spec
        self.num_blocks = min(budget_bytes // spec.block_bytes, 2**31 // BLOCK_SIZE - 1)
        if self.num_blocks < 1:
            raise ValueError(
                f"a cache of {budget_bytes} bytes holds no block of {BLOCK_SIZE} positions, which takes {spec.block_bytes} bytes here; "
                f"give it more (kv_cache_bytes), or free some memory"
            )
        self._kv: list[KVBlocks] = []
        self._num_touched = 0  # blocks handed out at least once: 0 .. _num_touched - 1
        self._free: list[int] = []  # a stack of those given back
        self._references = array("i")  # per touched block

    @property
    def kv(self) -> list[KVBlocks]:
        """The blocks of each layer; allocated when first asked for."""
        if not self._kv:
            try:
                self._kv = self.spec.allocate(self.num_blocks)
            except (OSError, OverflowError, ValueError) as error:
                raise MemoryError(f"could not reserve {self.budget_bytes} bytes of address space for the cache: {error}") from None
        return self._kv

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - self._num_touched + len(self._free)

    @property
    def capacity(self) -> int:
        """Positions that one sequence alone can have."""
        return self.num_blocks * BLOCK_SIZE

    @property
    def budget_bytes(self) -> int:
        """Bytes of all blocks: what the cache may grow to."""
        return self.num_blocks * self.spec.block_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the blocks of one sequence of so many tokens."""
        return -(-num_tokens // BLOCK_SIZE) * self.spec.block_bytes

    @property
    def touched_bytes(self) -> int:
        """Bytes of the blocks used at least once, which is what may be resident."""
        return self._num_touched * self.spec.block_bytes

    @property
    def used_bytes(self) -> int:
        return (self.num_blocks - self.num_free_blocks) * self.spec.block_bytes

    # -- what sequences do ---------------------------------------------------------------------------------------------

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for positions `num_computed .. num_tokens - 1` of the sequence to be written; False, and nothing changed,
        where the pool has too few free blocks. Blocks to be written that others hold as well are copied first."""
        table = sequence.block_table
        shared = self._shared_and_written(sequence)
        num_missing = max(0, -(-num_tokens // BLOCK_SIZE) - len(table))
        if num_missing + len(shared) > self.num_free_blocks:
            return False
        for index in shared:
            self._copy_on_write(table, index, holds_content=index * BLOCK_SIZE < sequence.num_computed)
        for _ in range(num_missing):
            table.append(self._take())
        return True

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that `reserve` would take."""
        return max(0, -(-num_tokens // BLOCK_SIZE) - len(sequence.block_table)) + len(self._shared_and_written(sequence))

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Declares the first `num_tokens` positions computed. What was written beyond them (rejected drafts) is void."""
        assert num_tokens <= len(sequence.block_table) * BLOCK_SIZE
        sequence.num_computed = num_tokens

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Forgets the positions from `num_tokens` on and gives back the blocks that held only those."""
        num_kept = -(-num_tokens // BLOCK_SIZE)
        sequence.num_computed = min(sequence.num_computed, num_tokens)
        while len(sequence.block_table) > num_kept:
            self._give_back(sequence.block_table.pop())

    def fork(self, source: Sequence, target: Sequence, num_tokens: int) -> None:
        """Gives `target`, which must hold no block, the first `num_tokens` computed positions of `source`; nothing is copied."""
        assert not target.block_table and num_tokens <= source.num_computed
        for block in source.block_table[: -(-num_tokens // BLOCK_SIZE)]:
            self._references[block] += 1
            target.block_table.append(block)
        target.num_computed = num_tokens

    def free(self, sequence: Sequence) -> None:
        """Gives back every block of the sequence; its tokens would have to be computed again."""
        self.truncate(sequence, 0)

    # -- when something went wrong -------------------------------------------------------------------------------------

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Forgets everything, in whatever state an interrupted step left it: all blocks are free, and `sequences`, which must
        be all that hold any, start again from their first token."""
        for sequence in sequences:
            sequence.num_computed = 0
            sequence.block_table = array("i")  # a new one: the traceback may still hold a view of the old
        self._references = array("i", [0]) * self._num_touched
        self._free = list(range(self._num_touched - 1, -1, -1))

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless each block is held exactly as often as `sequences` (all there are) hold it, is free or
        held but not both, and each sequence has blocks for what it has computed."""
        held: Counter[int] = Counter()
        for sequence in sequences:
            held.update(sequence.block_table)
            assert 0 <= sequence.num_computed <= len(sequence.block_table) * BLOCK_SIZE, f"blocks are missing: {sequence}"
            assert sequence.num_computed <= len(sequence.tokens), f"more computed than there are tokens: {sequence}"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(self._references) == self._num_touched <= self.num_blocks
        for block, count in enumerate(self._references):
            assert count == held[block], f"block {block} counts {count} holders and has {held[block]}"
            assert (count == 0) == (block in free), f"block {block} has {count} holders and is {'free' if block in free else 'not free'}"
        assert not held or max(held) < self._num_touched, "a sequence holds a block that was never handed out"

    # -- single blocks -------------------------------------------------------------------------------------------------

    def _shared_and_written(self, sequence: Sequence) -> list[int]:
        """Indices in the block table, from the first position not computed on, of blocks that others hold too."""
        table = sequence.block_table
        return [index for index in range(sequence.num_computed // BLOCK_SIZE, len(table)) if self._references[table[index]] > 1]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
            self._references[block] = 1
            return block
        self._references.append(1)
        self._num_touched += 1
        return self._num_touched - 1

    def _give_back(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)

    def _copy_on_write(self, table: array, index: int, holds_content: bool) -> None:
        old, new = table[index], self._take()
        if holds_content:
            for layer in self.kv:
                layer.k[new].copy_(layer.k[old])
                layer.v[new].copy_(layer.v[old])
        table[index] = new
        self._give_back(old)
