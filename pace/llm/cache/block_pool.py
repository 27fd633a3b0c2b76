"""The blocks of a cache: their memory, their holders, and which of them are free."""

from __future__ import annotations

import itertools
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from pace.batch import BLOCK_SIZE, KVSpec, LayerBlocks
from pace.memory import populate


def num_blocks_of(num_tokens: int) -> int:
    """Number of blocks that hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_SIZE)


class Pool:
    """Counts the holders of equal pieces of memory, called blocks here. A block is free, held by one or more sequences,
    or *idle*: held by none, with its content kept for reuse.

    Free blocks are handed out lowest first and reused last-freed first, so that resident memory stays at the peak of
    use. If none is free, the block that was idle longest is taken.
    """

    def __init__(self, num_blocks: int, max_idle_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.max_idle_blocks = max_idle_blocks
        self.content_is_lost: Callable[[int], None] = lambda block: None
        """Called with a kept block whose content is dropped."""
        self.num_touched = 0  # blocks handed out at least once: 0 .. num_touched - 1
        self._free: list[int] = []  # a stack of the touched blocks that are free
        self._references = array("i")  # number of holders of each touched block
        self._kept: set[int] = set()  # blocks whose content must not change and outlives their holders
        self._idle: dict[int, None] = {}  # kept blocks without a holder, longest idle first

    @property
    def num_free(self) -> int:
        """Number of blocks that can be taken, including idle ones."""
        return self.num_blocks - self.num_touched + len(self._free) + len(self._idle)

    @property
    def num_kept(self) -> int:
        """Number of blocks whose content is kept, held or idle."""
        return len(self._kept)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def idle_blocks(self) -> list[int]:
        """Idle blocks in the order in which they would be taken."""
        return list(self._idle)

    def is_kept(self, block: int) -> bool:
        return block in self._kept

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    # -- taking and giving back ----------------------------------------------------------------------------------------

    def take(self) -> int:
        """Takes a block for one holder, content undefined. `num_free` must be positive."""
        if not self._free:
            if self.num_touched < self.num_blocks:
                self._references.append(0)
                self.num_touched += 1
                self._free.append(self.num_touched - 1)
            else:
                self._drop_idle()
        block = self._free.pop()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Adds a holder to a block that is held or idle."""
        self._references[block] += 1
        self._idle.pop(block, None)

    def give_back(self, block: int) -> None:
        """Removes one holder of a block."""
        self._references[block] -= 1
        if self._references[block]:
            return
        if block not in self._kept:
            self._free.append(block)
            return
        self._idle[block] = None
        if len(self._idle) > self.max_idle_blocks:
            self._drop_idle()

    def keep(self, block: int) -> None:
        """Keeps the content of a held block after its holders are gone, until the block is needed for something
        else."""
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """Ends the keeping of a block's content after its holders are gone."""
        self._kept.remove(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def claim(self, block: int) -> None:
        """Drops the content of a kept block that only the caller holds, who may then write to it."""
        self.content_is_lost(block)
        self._kept.remove(block)

    def is_shared(self, block: int) -> bool:
        """True if others rely on the content of a block that the caller holds."""
        return self._references[block] > 1 or block in self._kept

    def has_other_holders(self, block: int) -> bool:
        """True if giving back a block that the caller holds frees no room."""
        return self._references[block] > 1

    def _drop_idle(self) -> None:
        block = next(iter(self._idle))
        self.content_is_lost(block)
        self.forget(block)

    # -- error recovery ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Frees all blocks, in any state that a failed call left. Makes new objects: a traceback may still hold a view
        of the old ones."""
        self._kept, self._idle = set(), {}
        self._references = array("i", [0]) * self.num_touched
        self._free = list(range(self.num_touched - 1, -1, -1))

    def check_integrity(self, held: Counter[int]) -> None:
        """Raises AssertionError unless each block is held as often as `held` says, and is in exactly one of its
        states."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert len(self._references) == self.num_touched <= self.num_blocks
        for block, count in enumerate(self._references):
            assert count == held[block], f"block {block} has a count of {count}, but {held[block]} holders"
            states = [
                name
                for name, is_so in (("held", count > 0), ("free", block in free), ("idle", block in self._idle))
                if is_so
            ]
            assert len(states) == 1, f"block {block} is {' and '.join(states) or 'nowhere'}"
        assert not held or max(held) < self.num_touched, "a sequence holds a block that was never allocated"
        assert set(self._idle) <= self._kept and not self._kept & free, "an idle block is not kept, or a free one is"
        assert len(self._idle) <= self.max_idle_blocks, (
            f"{len(self._idle)} blocks are idle; the maximum is {self.max_idle_blocks}"
        )


class BlockPool(Pool):
    """The blocks of keys and values, and their memory.

    The memory is one allocation, made at first use and as large as the budget. The operating system maps pages only
    where a block is written.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, max_idle_blocks: int = 0) -> None:
        super().__init__(num_blocks, max_idle_blocks)
        self.spec = spec
        self._kv: list[LayerBlocks] = []
        self._bytes = np.empty(
            (0, 0), np.uint8
        )  # [num_blocks, block_bytes], the same memory; empty until the first access

    @property
    def kv(self) -> list[LayerBlocks]:
        """Blocks of each layer; allocated on first access. Raises MemoryError if the address space is exhausted."""
        if not self._kv:
            memory = reserved(self.spec.reserve, self.num_blocks, self.spec.block_bytes)
            self._bytes, self._kv = memory.numpy(), self.spec.views(memory)
        return self._kv

    def copy(self, source: int, target: int, num_blocks: int = 1) -> None:
        """Copies a run of adjacent blocks, all layers at once, to a run that does not overlap it."""
        self._bytes[target : target + num_blocks] = self._bytes[source : source + num_blocks]

    def contents(self, blocks: Sequence[int], num_bytes: int) -> np.ndarray:
        """Returns a copy of the first bytes of blocks, uint8 `[blocks, num_bytes]`."""
        return self._bytes[np.asarray(blocks, np.int64), :num_bytes]

    def fill(self, blocks: Sequence[int], contents: np.ndarray) -> None:
        """Writes `contents [blocks, num_bytes]` to the first bytes of blocks of one holder. `kv` must have been
        accessed."""
        self._bytes[np.asarray(blocks, np.int64), : contents.shape[1]] = contents

    def populate(self, blocks: Sequence[int]) -> None:
        """Makes the memory of blocks resident, and does not change it. Any thread may call it, also for blocks of
        others."""
        for _, run in itertools.groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
            first, *rest = (block for _, block in run)
            populate(self._bytes[first].ctypes.data, (1 + len(rest)) * self._bytes.shape[1])


def weakly(method: Callable[[int], None]) -> Callable[[int], None]:
    """Returns a function that calls `method` while its object exists. A strong reference from the pool would keep all
    memory until a collection."""
    reference = weakref.WeakMethod(method)

    def call(block: int) -> None:
        if found := reference():
            found(block)

    return call


def reserved(reserve: Callable[[int], Tensor], count: int, size: int) -> Tensor:
    """Returns `reserve(count)`, which reserves `count` pieces of `size` bytes. Raises MemoryError if the address space
    is exhausted."""
    try:
        return reserve(count)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"could not reserve {count * size} bytes of address space for the cache: {error}") from None
