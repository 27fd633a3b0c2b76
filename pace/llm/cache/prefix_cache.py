"""Sequences that begin alike share the blocks of their beginning, also after the first of them has ended."""

from __future__ import annotations

import itertools
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pace.batch import BLOCK_SIZE
from pace.llm.cache.block_pool import BlockPool
from pace.llm.cache.groups import first_kept, give_back_before, tables_of
from pace.llm.sequence import Sequence

Tokens = tuple[int, ...]


class RootKey(NamedTuple):
    """What besides the tokens decides about keys and values, or about who may share them."""

    rope_regime: int
    """The model's, of the sequence's `rope_length`."""
    adapter: Hashable
    cache_salt: str | None


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """16 positions whose keys and values are known, and what is known to follow them.

    Its path from the root spells the tokens that they were computed from; the root stands for a `RootKey`. Python's
    dict finds a child by the hash of its 16 tokens and then compares them one by one: the path is the chained hash, and
    what merely has the same hash is another child."""

    parent: Node | None
    """None for a root, which has a key instead of tokens, and no blocks."""
    tokens: Tokens | RootKey
    blocks: list[int]
    """Of each group of layers; -1 where a group with a window has lost its own."""
    children: dict[Tokens, Node] = field(default_factory=dict)


class PrefixCache:
    """The blocks that sequences have filled, by the tokens in them and before them.

    Blocks enter when they are full (`publish`) and are not written again: a sequence that is cut back and goes on
    differently copies them first. When nobody holds one any more it is idle, until the pool wants it for something else.

    A group of layers without a window needs every block of a text. Sequences give its blocks back from the last to the
    first and hold one only together with all before it, so the one that has been idle for longest never has a known
    block behind it. When it goes, so do those of the same positions in other groups. A group with a window needs the
    last ones alone; a block that it loses leaves a gap, and what stands behind may still be used.
    """

    def __init__(self, pool: BlockPool, rope_regime: Callable[[int], int]) -> None:
        """`rope_regime(n)` is the model's; sequences share only where their `RootKey` is the same."""
        self.pool = pool
        self.rope_regime = rope_regime
        self.windows = [group.window for group in pool.spec.groups]
        forget = weakref.WeakMethod(self._forget)  # a pool that held its cache would keep all memory until a collection
        pool.content_is_lost = lambda block: forget()(block)
        self.reset()

    def reset(self) -> None:
        """Forgets everything; the pool was reset."""
        self._roots: dict[RootKey, Node] = {}
        self._nodes: dict[int, Node] = {}  # by block

    def reuse(self, sequence: Sequence) -> None:
        """Gives the sequence the known blocks that its next tokens are in, in place of what it has there. At least the
        tokens whose logits are wanted remain to be computed."""
        index, end = sequence.num_computed // BLOCK_SIZE, sequence.logits_from // BLOCK_SIZE
        if index >= end:
            return
        num_before, times = sequence.num_computed, sequence.times
        found: list[Node] = []
        node = self._node_before(sequence, index)
        while index + len(found) < end and node:
            if node := node.children.get(tokens_of(sequence, index + len(found))):
                found.append(node)
        if num_found := self._num_usable(found, index):
            self._take(sequence, index, found[:num_found])
        if times.first_token is None:  # what is found again after a preemption is no saving
            times.num_reused = (times.num_reused if num_before else 0) + sequence.num_computed - num_before

    def publish(self, sequence: Sequence) -> None:
        """Makes the sequence's full blocks known. Where the same tokens are known already, it takes the known
        blocks, which hold the same bits, and gives its own back."""
        table = sequence.block_table
        end = first = min(sequence.num_computed, len(sequence.tokens)) // BLOCK_SIZE
        while first and table[first - 1] not in self._nodes:
            first -= 1
        if first == end:
            return
        key = self._root_key(sequence)
        node = self._node_before(sequence, first) or self._roots.setdefault(key, Node(None, key, []))
        for index in range(first, end):
            tokens = tokens_of(sequence, index)
            known = node.children.get(tokens)
            if known is None:
                known = node.children[tokens] = Node(node, tokens, [-1] * len(self.windows))
            for group, table in enumerate(sequence.block_tables):
                if known.blocks[group] < 0:
                    known.blocks[group] = table[index]
                    self._nodes[table[index]] = known
                    self.pool.keep(table[index])
                elif known.blocks[group] != table[index]:
                    self.pool.share(known.blocks[group])
                    self.pool.give_back(table[index])
                    table[index] = known.blocks[group]
            node = known

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every known block is reached from a root and kept by the pool, holders hold what
        their tokens say, and what is idle can be dropped in order."""
        for block, node in self._nodes.items():
            assert block in node.blocks and self.pool.is_kept(block), f"block {block} is known and not kept"
            assert node.parent and node.parent.children.get(node.tokens) is node, (
                f"block {block} is known and cannot be found"
            )
            full = [block for block, window in zip(node.blocks, self.windows) if window is None]
            assert -1 not in full, f"block {block} is known and cannot be used"
            root = node.parent
            while root.parent:
                assert not full or max(root.blocks) in self._nodes, f"block {block} follows one that is not known"
                root = root.parent
            assert root in self._roots.values(), f"block {block} is known below no root"
        assert len(self._nodes) == self.pool.num_kept, "a block is kept and not known"
        assert all(root.children for root in self._roots.values()), "a root is known under which nothing is"
        dropped: set[int] = set()
        for block in self.pool.idle_blocks:
            node = self._nodes[block]
            group = node.blocks.index(block)
            is_last = all(child.blocks[group] in dropped for child in node.children.values())
            assert self.windows[group] is not None or is_last, f"block {block} would be dropped before what follows it"
            dropped.add(block)
        for sequence in sequences:
            num_full = sequence.num_computed // BLOCK_SIZE
            for index, block in itertools.chain.from_iterable(
                enumerate(table[:num_full]) for table in sequence.block_tables
            ):
                assert block not in self._nodes or self._nodes[block].tokens == tokens_of(sequence, index), (
                    f"{sequence} holds other tokens in block {block}"
                )

    def _node_before(self, sequence: Sequence, index: int) -> Node | None:
        """What is known before a block of the table; None where that is nothing."""
        return self._nodes.get(sequence.block_table[index - 1]) if index else self._roots.get(self._root_key(sequence))

    def _root_key(self, sequence: Sequence) -> RootKey:
        return RootKey(self.rope_regime(sequence.rope_length), sequence.adapter, sequence.cache_salt)

    def _num_usable(self, found: list[Node], index: int) -> int:
        """Of nodes that follow block `index - 1` of a sequence, how many to use: up to the last after which every group
        has what the next position sees."""
        if all(window is None for window in self.windows):
            return len(found)
        num_usable, gaps = 0, [0] * len(self.windows)  # the index behind each group's last gap
        for depth, node in enumerate(found, index + 1):
            gaps = [depth if block < 0 else gap for block, gap in zip(node.blocks, gaps)]
            if all(gap <= first_kept(depth * BLOCK_SIZE, window) for gap, window in zip(gaps, self.windows)):
                num_usable = depth - index
        return num_usable

    def _take(self, sequence: Sequence, index: int, nodes: list[Node]) -> None:
        """Puts known blocks into the tables of the sequence, from an index on, as far as they are still to be seen."""
        sequence.num_computed = BLOCK_SIZE * (index + len(nodes))
        tables = tables_of(sequence, len(self.windows))
        starts = [max(index, first_kept(sequence.num_computed, window)) for window in self.windows]
        taken = [[node.blocks[group] for node in nodes[start - index :]] for group, start in enumerate(starts)]
        for block in itertools.chain(*taken):  # before any is given back: none of these may be dropped for it
            self.pool.share(block)
        for table, blocks, start, window in zip(tables, taken, starts, self.windows):
            give_back_before(self.pool, table, first_kept(sequence.num_computed, window))
            replaced = table[start : start + len(blocks)]
            table[start : start + len(blocks)] = array("i", blocks)
            for block in replaced:
                self.pool.give_back(block)

    def _forget(self, block: int) -> None:
        """The pool takes an idle block."""
        node = self._nodes.pop(block)
        group = node.blocks.index(block)
        node.blocks[group] = -1
        if self.windows[group] is None:
            self._forget_all(node)
        while node.parent and not node.children and max(node.blocks) < 0:
            del node.parent.children[node.tokens]
            node = node.parent
        if not node.parent and not node.children:
            del self._roots[node.tokens]

    def _forget_all(self, node: Node) -> None:
        """Nobody can use the other blocks of the same positions any more."""
        for group, block in enumerate(node.blocks):
            if block >= 0:
                node.blocks[group] = -1
                del self._nodes[block]
                self.pool.forget(block)


class NoPrefixCache:
    """Knows nothing: every token is computed."""

    def reset(self) -> None:
        pass

    def reuse(self, sequence: Sequence) -> None:
        pass

    def publish(self, sequence: Sequence) -> None:
        pass

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        pass


def tokens_of(sequence: Sequence, index: int) -> Tokens:
    """Of a full block of its table."""
    return tuple(sequence.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
