"""Prefix cache: sequences with the same beginning share its blocks, also after the first of them has ended."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pace.batch import BLOCK_SIZE
from pace.llm.cache.block_pool import BlockPool, weakly
from pace.llm.cache.groups import first_kept, give_back_before, tables_of
from pace.llm.cache.state_cache import StatePoint
from pace.llm.sequence import AdapterKey, Sequence, Span

MediaPart = tuple[bytes, int]
"""Digest of a medium that overlaps a block, and the index of the block's first token among its tokens, which may be
negative."""
Tokens = tuple[int | MediaPart, ...]
"""Token ids of a block, then the media that overlap it."""


class RootKey(NamedTuple):
    """Values that must be equal, in addition to the tokens, for sequences to share keys and values."""

    rope_regime: int
    """The model's `rope_regime` for the sequence's `rope_length`."""
    cache_salt: str | None
    adapter: AdapterKey = ()


NodeKey = Tokens | RootKey


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """16 positions whose keys and values are known, and the nodes that follow them.

    The path from the root spells the tokens they were computed from; the root stands for a `RootKey`. Python's dict
    finds a child by the hash of its 16 tokens and then compares them one by one. So the path is the chained hash, and a
    hash collision gives another child."""

    parent: Node | None
    """None for a root, which has a key instead of tokens, and no blocks."""
    tokens: NodeKey
    blocks: list[int]
    """One block for each group of layers; -1 if a group with a window has lost its block."""
    children: dict[NodeKey, Node] = field(default_factory=dict)
    slot: int = -1
    """Slot of the states after the block; -1 if they are not known."""


class PrefixCache:
    """Full blocks of sequences, indexed by the tokens in them and before them.

    Blocks enter when they are full (`publish`) and are not written again: a sequence that is truncated and continues
    differently copies them first. A block that no sequence holds is idle, until the pool needs it.

    A group of layers without a window needs every block of a text. Sequences give back its blocks from the last to the
    first, and hold a block only together with all before it. So the block that was idle longest never has a known block
    after it. When it is dropped, so are the blocks of the same positions in other groups.

    A group with a window needs only the last blocks. A block it loses leaves a gap, and the blocks after it may still
    be used.
    """

    def __init__(self, pool: BlockPool, rope_regime: Callable[[int], int]) -> None:
        """`rope_regime(n)` is the model's. Sequences share blocks only if their `RootKey` is the same."""
        self.pool = pool
        self.rope_regime = rope_regime
        self.windows = [group.window for group in pool.spec.groups]
        self.may_resume_at: Callable[[Sequence, int], bool] = lambda sequence, position: True
        """True if a sequence can continue at a position with the positions before it that windows show. Otherwise, it
        needs older ones."""
        pool.content_is_lost = weakly(self._forget)
        self.reset()

    def reset(self) -> None:
        """Drops everything; the pool was reset."""
        self._roots: dict[NodeKey, Node] = {}
        self._nodes: dict[int, Node] = {}  # by block

    def reuse(self, sequence: Sequence) -> None:
        """Replaces the sequence's blocks for its next tokens by known blocks with these tokens. Tokens whose logits are
        wanted are still computed."""
        index, end = sequence.num_computed // BLOCK_SIZE, sequence.logits_from // BLOCK_SIZE
        if index >= end:
            return
        num_before, times = sequence.num_computed, sequence.stats
        found: list[Node] = []
        node = self._node_before(sequence, index)
        while index + len(found) < end and node:
            if node := node.children.get(tokens_of(sequence, index + len(found))):
                found.append(node)
        num_found = self._num_usable(sequence, found, index)
        if num_found < len(found):
            sequence.state.branch = BLOCK_SIZE * (index + len(found))
        if num_found:
            self._take(sequence, index, found[:num_found])
        if times.first_token is None:  # blocks found again after a preemption save nothing
            times.num_reused = (times.num_reused if num_before else 0) + sequence.num_computed - num_before

    def marks(self, span: Span) -> list[int]:
        """Positions at which the step that computes `span` keeps its states; none for a model without states."""
        return []

    def points(self, sequence: Sequence, num_tokens: int) -> Iterable[StatePoint]:
        """Points at or before `num_tokens` at which states of the sequence are known."""
        return []

    def publish(self, sequence: Sequence) -> None:
        """Adds the sequence's full blocks. If the same tokens are known already, the sequence takes the known blocks,
        which hold the same bits, and gives back its own."""
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
                if table[index] < 0:  # not kept of a sequence that was loaded from a file
                    continue
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
        """Raises AssertionError unless every known block is reachable from a root and kept by the pool. Holders must
        have the block's tokens, and idle blocks must be droppable in order."""
        for block, node in self._nodes.items():
            assert block in node.blocks and self.pool.is_kept(block), (
                f"block {block} is indexed, but not kept by the pool"
            )
            assert node.parent and node.parent.children.get(node.tokens) is node, (
                f"block {block} is indexed, but not found from its parent"
            )
            full = [block for block, window in zip(node.blocks, self.windows) if window is None]
            assert -1 not in full, f"block {block} is indexed, but another group lacks its positions"
            root = node.parent
            while root.parent:
                assert not full or max(root.blocks) in self._nodes, f"block {block} follows a block that is not indexed"
                root = root.parent
            assert root in self._roots.values(), f"block {block} is indexed below no root"
        assert len(self._nodes) == self.pool.num_kept, "a block is kept, but not indexed"
        assert all(root.children for root in self._roots.values()), "a root has no blocks"
        dropped: set[int] = set()
        for block in self.pool.idle_blocks:
            node = self._nodes[block]
            group = node.blocks.index(block)
            is_last = all(child.blocks[group] in dropped for child in node.children.values())
            assert self.windows[group] is not None or is_last, (
                f"block {block} would be evicted before the blocks after it"
            )
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
        """Returns the node before block `index` of the sequence's table, or the root for index 0; None if unknown."""
        return self._nodes.get(sequence.block_table[index - 1]) if index else self._roots.get(self._root_key(sequence))

    def _root_key(self, sequence: Sequence) -> RootKey:
        return RootKey(self.rope_regime(sequence.rope_length), sequence.cache_salt, sequence.adapter)

    def _num_usable(self, sequence: Sequence, found: list[Node], index: int) -> int:
        """Returns the number of nodes in `found` that can be used; they follow block `index - 1` of the sequence. After
        the last one, every group must have all blocks that the next position sees, and states must be known."""
        if all(window is None for window in self.windows):
            return next((count for count in range(len(found), 0, -1) if self._may_end_at(found[count - 1])), 0)
        num_usable, gaps = 0, [0] * len(self.windows)  # the index after each group's last gap
        for depth, node in enumerate(found, index + 1):
            gaps = [depth if block < 0 else gap for block, gap in zip(node.blocks, gaps)]
            has_all = all(gap <= first_kept(depth * BLOCK_SIZE, window) for gap, window in zip(gaps, self.windows))
            if has_all and self._may_end_at(node) and self.may_resume_at(sequence, depth * BLOCK_SIZE):
                num_usable = depth - index
        return num_usable

    def _may_end_at(self, node: Node) -> bool:
        """True if a sequence can continue after the node's block."""
        return True

    def _take(self, sequence: Sequence, index: int, nodes: list[Node]) -> None:
        """Puts known blocks into the sequence's tables from `index` on, as far as later positions see them."""
        sequence.num_computed = BLOCK_SIZE * (index + len(nodes))
        tables = tables_of(sequence, len(self.windows))
        starts = [max(index, first_kept(sequence.num_computed, window)) for window in self.windows]
        taken = [[node.blocks[group] for node in nodes[start - index :]] for group, start in enumerate(starts)]
        for block in itertools.chain(*taken):  # before any is given back, so that none of these is dropped
            self.pool.share(block)
        for table, blocks, start, window in zip(tables, taken, starts, self.windows):
            give_back_before(self.pool, table, first_kept(sequence.num_computed, window))
            replaced = table[start : start + len(blocks)]
            table[start : start + len(blocks)] = array("i", blocks)
            for block in replaced:
                self.pool.give_back(block)

    def _forget(self, block: int) -> None:
        """Called when the pool takes an idle block."""
        node = self._nodes.pop(block)
        group = node.blocks.index(block)
        node.blocks[group] = -1
        self._block_is_lost(node)
        if self.windows[group] is None:
            self._forget_all(node)
        while node.parent and not node.children and max(node.blocks) < 0:
            del node.parent.children[node.tokens]
            node = node.parent
        if not node.parent and not node.children:
            del self._roots[node.tokens]

    def _block_is_lost(self, node: Node) -> None:
        """Called after a node has lost a block."""

    def _forget_all(self, node: Node) -> None:
        """Drops the other blocks of the same positions, which can no longer be used."""
        for group, block in enumerate(node.blocks):
            if block >= 0:
                node.blocks[group] = -1
                del self._nodes[block]
                self.pool.forget(block)


class NoPrefixCache:
    """Stores nothing: every token is computed."""

    may_resume_at: Callable[[Sequence, int], bool] = staticmethod(lambda sequence, position: True)

    def reset(self) -> None:
        pass

    def reuse(self, sequence: Sequence) -> None:
        pass

    def marks(self, span: Span) -> list[int]:
        return []

    def points(self, sequence: Sequence, num_tokens: int) -> Iterable[StatePoint]:
        return []

    def publish(self, sequence: Sequence) -> None:
        pass

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        pass


def tokens_of(sequence: Sequence, index: int) -> Tokens:
    """Tokens of a full block, given its index in the sequence's table. Placeholders of two images are equal, so the
    images are a part of them."""
    start, end = index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE
    tokens: Tokens = tuple(sequence.tokens[start:end])
    for placed in sequence.media:
        if placed.start < end and start < placed.end:
            tokens += ((placed.media.digest, start - placed.start + placed.first),)
    return tokens
