"""Marks: states at the ends of known blocks, from which a sequence with the same beginning can continue.

Keys and values are known at every position, but states only at marks. A step writes a mark to a slot of its own. The
prefix cache's node of the block that ends there has the slot. Marks are optional: the one that was idle longest gives
way to a sequence that needs its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pace.batch import BLOCK_SIZE
from pace.llm.cache.block_pool import BlockPool, num_blocks_of, weakly
from pace.llm.cache.prefix_cache import Node, PrefixCache
from pace.llm.cache.state_cache import STATE_TOKENS, StateCache, StatePoint
from pace.llm.sequence import Sequence, Span

PROMPT_SHARE = 4
"""A prompt may fill a quarter of the idle slots at regular distances, and another one near its end. So the marks of a
few prompts live side by side."""


@dataclass(frozen=True)
class MarkPlaces:
    """Where a prompt leaves marks."""

    interval: int
    """Largest distance of marks in tokens, if slots suffice."""
    max_marks: int
    """Maximum number of marks at regular distances, and of marks near the end."""

    def of(self, num_tokens: int, start: int, end: int, branch: int) -> list[int]:
        """Returns the positions after `start` and up to `end`, ascending, for a prompt of `num_tokens` tokens.

        A repeated prompt continues from its last full block. The next turn of a chat departs a little before the end.
        Another question about the same document departs somewhere before that, so distances to the end grow by a
        factor. Regular marks bound what any other text computes again. At `branch`, earlier texts went on
        differently."""
        last = (num_tokens - 1) // BLOCK_SIZE
        step = num_blocks_of(max(1, self.interval, num_tokens // self.max_marks))
        regular = range(start // (step * BLOCK_SIZE) + 1, end // (step * BLOCK_SIZE) + 1)
        blocks = [*(step * index for index in regular), *(last - distance for distance in self._distances(last, step))]
        places = {branch, *(BLOCK_SIZE * block for block in blocks)}
        return sorted(place for place in places if start < place <= end)

    def _distances(self, last: int, step: int) -> list[int]:
        """Returns distances to the end in blocks, in a prompt of `last` full blocks. They grow by a factor of at least
        two. If there are few marks, the factor is so large that they reach the regular marks, `step` blocks apart."""
        num_growing = max(0, self.max_marks - 2)
        factor = max(2.0, min(step, last) ** (1 / (num_growing + 1)))
        powers = range(1, min(num_growing + 1, last.bit_length()) + 1)
        return list(dict.fromkeys([1, 0, *(int(factor**power) - 1 for power in powers)]))[: self.max_marks]


class MarkedPrefixCache(PrefixCache):
    """A prefix cache for a model with states: a text is reused up to a mark."""

    def __init__(self, pool: BlockPool, rope_regime: Callable[[int], int], states: StateCache) -> None:
        self.states = states
        self.slots = states.pool
        self.slots.content_is_lost = weakly(self._mark_is_lost)
        token_bytes = pool.spec.block_bytes * len(pool.spec.groups) // BLOCK_SIZE
        interval = min(STATE_TOKENS, states.spec.slot_bytes // token_bytes)
        self.places = MarkPlaces(interval, max(1, self.slots.max_idle_blocks // PROMPT_SHARE))
        super().__init__(pool, rope_regime)

    def reset(self) -> None:
        super().reset()
        self._marked: dict[int, Node] = {}  # by slot

    def marks(self, span: Span) -> list[int]:
        """Positions at which the step leaves a mark, ascending, as far as there are slots. A text that is being
        generated has one mark, which moves along."""
        start, sequence = span.start, span.sequence
        end = start + span.num_tokens + span.num_certain
        if span.num_tokens > 1:
            places = self.places.of(len(sequence.tokens), start, end, sequence.state.branch)
            return places[-self.slots.num_free :] if self.slots.num_free else []
        place = end // BLOCK_SIZE * BLOCK_SIZE
        if place <= start:
            return []
        last = self._node_at(sequence, sequence.state.tail)
        if last and last.slot >= 0 and self.slots.is_idle(last.slot):
            self._unmark(last)
        has_room = self.slots.num_idle < max(1, self.slots.max_idle_blocks // 2)
        if not has_room or self.slots.num_free == self.slots.num_idle:
            return []
        sequence.state.tail = place
        return [place]

    def publish(self, sequence: Sequence) -> None:
        super().publish(sequence)
        state = sequence.state
        marks, state.marks = state.marks, []
        for place, slot in marks:
            node = self._node_at(sequence, place)
            if node and node.slot < 0:
                node.slot, self._marked[slot] = slot, node
                self.slots.keep(slot)
            self.slots.give_back(slot)

    def points(self, sequence: Sequence, num_tokens: int) -> Iterator[StatePoint]:
        """Yields the marks on the way to the sequence's own blocks, at or before `num_tokens`, last first."""
        end = num_tokens // BLOCK_SIZE
        for index in range(min(end, len(sequence.block_table)), 0, -1):
            node = self._nodes.get(sequence.block_table[index - 1])
            if node and node.slot >= 0:
                yield StatePoint(index * BLOCK_SIZE, node.slot, 0)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Also raises AssertionError unless each mark hangs on a node with all its blocks, and was written there."""
        super().check_integrity(sequences)
        for slot, node in self._marked.items():
            assert node.slot == slot and self.slots.is_kept(slot), f"slot {slot} is no mark of its node"
            assert min(node.blocks) >= 0, f"the mark in slot {slot} has lost its block"
            depth, root = 0, node
            while root.parent:
                depth, root = depth + 1, root.parent
            seen = self.states.tokens_seen[slot]
            assert seen == depth * BLOCK_SIZE, f"the mark in slot {slot} has seen {seen} tokens, not {depth} blocks"
        assert len(self._marked) == self.slots.num_kept, "a slot is kept, but is no mark"

    # -- hooks of the prefix cache -------------------------------------------------------------------------------------

    def _may_end_at(self, node: Node) -> bool:
        return node.slot >= 0

    def _take(self, sequence: Sequence, index: int, nodes: list[Node]) -> None:
        super()._take(sequence, index, nodes)
        self.states.enter(sequence, StatePoint(sequence.num_computed, nodes[-1].slot, 0))

    def _block_is_lost(self, node: Node) -> None:
        if node.slot >= 0:
            self._unmark(node)

    # ------------------------------------------------------------------------------------------------------------------

    def _node_at(self, sequence: Sequence, num_tokens: int) -> Node | None:
        """Returns the node of the sequence's block that ends after `num_tokens` tokens, if it is known."""
        index = num_tokens // BLOCK_SIZE - 1
        return self._nodes.get(sequence.block_table[index]) if 0 <= index < len(sequence.block_table) else None

    def _unmark(self, node: Node) -> None:
        """Drops the mark of a node. Sequences that hold its slot keep it."""
        self.slots.forget(node.slot)
        self._mark_is_lost(node.slot)

    def _mark_is_lost(self, slot: int) -> None:
        """Called when the pool takes the slot of a mark."""
        self._marked.pop(slot).slot = -1
