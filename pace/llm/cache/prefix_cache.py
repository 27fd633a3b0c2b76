"""Sequences that begin alike share the blocks of their beginning, also after the first of them has ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pace.batch import BLOCK_SIZE
from pace.llm.cache.block_pool import BlockPool
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
    """A block whose keys and values are known, and what is known to follow it.

    Its path from the root spells the tokens that they were computed from; the root stands for a `RootKey`. Python's
    dict finds a child by the hash of its 16 tokens and then compares them one by one: the path is the chained hash, and
    what merely has the same hash is another child."""

    parent: Node | None
    """None for a root, which has a key instead of tokens, and no block."""
    tokens: Tokens | RootKey
    block: int
    children: dict[Tokens, Node] = field(default_factory=dict)


class PrefixCache:
    """The blocks that sequences have filled, by the tokens in them and before them.

    A block enters when it is full (`publish`) and is not written again: a sequence that is cut back and goes on
    differently copies it first. When nobody holds it any more it is idle, until the pool wants it for something else.
    Sequences give blocks back from the last to the first and hold a block only together with all before it, so the one
    that has been idle for longest never has a known block behind it.
    """

    def __init__(self, pool: BlockPool, rope_regime: Callable[[int], int]) -> None:
        """`rope_regime(n)` is the model's; sequences share only where their `RootKey` is the same."""
        self.pool = pool
        self.rope_regime = rope_regime
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
        node = self._node_before(sequence, index)
        while index < end and node and (node := node.children.get(tokens_of(sequence, index))):
            self._hold(sequence, index, node.block)
            index += 1
            sequence.num_computed = index * BLOCK_SIZE
        if times.first_token is None:  # what is found again after a preemption is no saving
            times.num_reused = (times.num_reused if num_before else 0) + sequence.num_computed - num_before

    def publish(self, sequence: Sequence) -> None:
        """Makes the sequence's full blocks known. Where the same tokens are known already, it takes the known
        block, which holds the same bits, and gives its own back."""
        table = sequence.block_table
        end = first = min(sequence.num_computed, len(sequence.tokens)) // BLOCK_SIZE
        while first and table[first - 1] not in self._nodes:
            first -= 1
        if first == end:
            return
        key = self._root_key(sequence)
        node = self._node_before(sequence, first) or self._roots.setdefault(key, Node(None, key, -1))
        for index in range(first, end):
            tokens = tokens_of(sequence, index)
            known = node.children.get(tokens)
            if known is None:
                known = node.children[tokens] = self._nodes[table[index]] = Node(node, tokens, table[index])
                self.pool.keep(known.block)
            self._hold(sequence, index, known.block)
            node = known

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every known block is reached from a root and kept by the pool, holders hold what
        their tokens say, and what is idle can be dropped in order."""
        for block, node in self._nodes.items():
            assert node.block == block and self.pool.is_kept(block), f"block {block} is known and not kept"
            assert node.parent and node.parent.children.get(node.tokens) is node, (
                f"block {block} is known and cannot be found"
            )
            assert node.parent.block in self._nodes or node.parent in self._roots.values(), (
                f"block {block} follows one that is not known"
            )
        assert len(self._nodes) == self.pool.num_kept, "a block is kept and not known"
        assert all(root.children for root in self._roots.values()), "a root is known under which nothing is"
        dropped: set[int] = set()
        for block in self.pool.idle_blocks:
            assert all(child.block in dropped for child in self._nodes[block].children.values()), (
                f"block {block} would be dropped before what follows it"
            )
            dropped.add(block)
        for sequence in sequences:
            for index, block in enumerate(sequence.block_table[: sequence.num_computed // BLOCK_SIZE]):
                assert block not in self._nodes or self._nodes[block].tokens == tokens_of(sequence, index), (
                    f"{sequence} holds other tokens in block {block}"
                )

    def _node_before(self, sequence: Sequence, index: int) -> Node | None:
        """What is known before a block of the table; None where that is nothing."""
        return self._nodes.get(sequence.block_table[index - 1]) if index else self._roots.get(self._root_key(sequence))

    def _root_key(self, sequence: Sequence) -> RootKey:
        return RootKey(self.rope_regime(sequence.rope_length), sequence.adapter, sequence.cache_salt)

    def _hold(self, sequence: Sequence, index: int, block: int) -> None:
        """Puts a known block into the sequence's table."""
        table = sequence.block_table
        if index == len(table):
            self.pool.share(block)
            table.append(block)
        elif table[index] != block:
            self.pool.share(block)
            self.pool.give_back(table[index])
            table[index] = block

    def _forget(self, block: int) -> None:
        """The pool takes an idle block."""
        node = self._nodes.pop(block)
        del node.parent.children[node.tokens]
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.parent.tokens]


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
