"""Slots for the states of sequences (`pace/states.py`): who holds which, and what a step reads and writes.

A slot belongs to one or more sequences. A sequence writes in place to a slot that only it holds. Otherwise it reads the
shared slot and writes to a *spare* one. So forks copy nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE, KVSpec, LayerBlocks
from pace.llm.cache.block_pool import Pool, reserved
from pace.llm.cache.groups import most_bytes
from pace.llm.sequence import Sequence, SequenceState, Span, StateStep
from pace.states import SlotSpec

STATE_TOKENS = 4096
"""Slots get as much of the budget as if each came with keys and values of this many tokens."""

LEAST_SHARE = Fraction(1, 16)
"""Least share of the budget for slots. Small slots are worth it: each is one more sequence, or one more prefix."""

LEAST_SLOTS = 2
"""A sequence that shares its slot reads one and writes another."""


class StatePoint(NamedTuple):
    """A number of tokens after which the states of a sequence are known."""

    num_tokens: int
    slot: int
    """-1 for zeros."""
    pending: int
    """Number of last tokens whose updates are in the journal of the slot, and not in its states."""


START = StatePoint(0, -1, 0)
"""The start of a sequence: its states are zeros, and it needs no slot."""


class StateCache:
    """The slots of all sequences of one model. Only the cache manager calls it."""

    def __init__(self, spec: SlotSpec, num_slots: int, max_idle_slots: int = 0) -> None:
        self.spec = spec
        self.pool = Pool(num_slots, max_idle_slots)
        self.max_drafts = spec.journal_rows
        self._memory: Tensor | None = None
        self.tokens_seen: dict[int, int] = {}
        """Number of tokens that the states in each written slot have seen; for `check_integrity`."""

    def fill(self, kv: list[LayerBlocks]) -> list[LayerBlocks]:
        """Returns `kv` with the slots of layers that have a state; allocated on first access. Raises MemoryError if the
        address space is exhausted."""
        if self._memory is None:
            self._memory = reserved(self.spec.reserve, self.pool.num_blocks, self.spec.slot_bytes)
        return [slots or blocks for slots, blocks in zip(self.spec.views(self._memory), kv)]

    # -- numbers -------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of slots that can be taken."""
        return self.pool.num_free

    @property
    def budget_bytes(self) -> int:
        return self.pool.num_blocks * self.spec.slot_bytes

    @property
    def touched_bytes(self) -> int:
        return self.pool.num_touched * self.spec.slot_bytes

    @property
    def used_bytes(self) -> int:
        return (self.pool.num_blocks - self.pool.num_free) * self.spec.slot_bytes

    @property
    def idle_bytes(self) -> int:
        return self.pool.num_idle * self.spec.slot_bytes

    def needed(self, sequence: Sequence) -> int:
        """Number of free slots that `reserve` takes."""
        state, pool = sequence.state, self.pool
        if state.spare >= 0:
            return 0
        if state.slot < 0 or pool.has_other_holders(state.slot):
            return 1
        return int(pool.is_kept(state.slot) and pool.num_free > 0)

    def held(self, sequence: Sequence) -> int:
        """Number of slots that the sequence holds, including shared ones."""
        return len(_slots_of(sequence.state))

    # -- calls of the manager ------------------------------------------------------------------------------------------

    def reserve(self, sequence: Sequence) -> None:
        """Makes sure that the next step has a slot to write. `num_free` must be at least `needed`. Without a free slot,
        a mark that only this sequence holds is given up."""
        state = sequence.state
        if self.needed(sequence):
            state.spare = self.pool.take()
        elif state.spare < 0 and self.pool.is_kept(state.slot):
            self.pool.claim(state.slot)

    def plan(self, span: Span, marks: Iterable[int] = ()) -> None:
        """Decides what the step reads and writes, once the span has its drafts. Drafts that are not certain leave the
        slot as it is. Takes a free slot for each of `marks`: positions among the certain tokens, ascending."""
        state, num_certain = span.sequence.state, span.num_tokens + span.num_certain
        num_drafts = len(span.drafts) - span.num_certain
        assert num_drafts <= self.max_drafts, f"{num_drafts} drafts, but the journal has {self.max_drafts} rows"
        write = state.slot if state.spare < 0 else state.spare
        assert write >= 0 and not self.pool.is_shared(write), f"no slot was reserved for {span.sequence}"
        taken = [(position - span.start, self.pool.take()) for position in marks]
        state.step = StateStep(state.slot, state.pending, write, num_certain, taken)

    def commit(self, sequence: Sequence, num_tokens: int) -> int:
        """Makes the written slot the sequence's, and counts accepted drafts as pending. Returns the number of tokens
        that the slot has seen, which is too many if it exceeds `num_tokens`."""
        state = sequence.state
        step, state.step = state.step, None
        assert step is not None, f"a step was not planned: {sequence}"
        if step.write != state.slot:
            self._give_back(state.slot)
            state.slot, state.spare = step.write, -1
        seen = sequence.num_computed + step.certain
        for row, slot in step.marks:
            self.tokens_seen[slot] = place = sequence.num_computed + row
            state.marks.append((place, slot))
        self.tokens_seen[state.slot] = seen
        state.pending = max(0, num_tokens - seen)
        return seen

    def points(self, sequence: Sequence, num_tokens: int) -> Iterator[StatePoint]:
        """Yields the points at or before `num_tokens` at which the sequence's own slots know its states."""
        state, seen = sequence.state, sequence.num_computed - sequence.state.pending
        if 0 < seen <= num_tokens and state.slot >= 0:
            yield StatePoint(num_tokens, state.slot, num_tokens - seen)
        if state.held >= 0 and state.num_held <= num_tokens:
            yield StatePoint(state.num_held, state.held, 0)

    def enter(self, sequence: Sequence, point: StatePoint) -> None:
        """Gives the sequence the states of `point`, and gives back its other slots unless it continues where it
        was."""
        state = sequence.state
        if point.slot >= 0:
            self.pool.share(point.slot)
        self._give_back(state.slot)
        state.slot, state.pending = point.slot, point.pending
        if not point.num_tokens:
            for slot in (state.spare, *(slot for _, slot in state.marks)):
                self._give_back(slot)
            state.spare, state.marks = -1, []

    def contents(self, slot: int) -> Tensor:
        """Returns the states in a slot, uint8 `[spec.state_bytes]`: a view."""
        return self._bytes_of(slot)

    def write(self, sequence: Sequence, contents: Tensor) -> None:
        """Writes the `contents` of another sequence to the slot that `reserve` took."""
        assert sequence.state.spare >= 0, f"{sequence} has no slot to write: {sequence.state}"
        self._bytes_of(sequence.state.spare).copy_(contents)

    def restore(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes the slot of `write` the sequence's, whose states are those after `num_tokens` tokens."""
        state = sequence.state
        state.slot, state.spare = state.spare, -1
        self.tokens_seen[state.slot] = num_tokens

    def mark(self, sequence: Sequence, num_tokens: int, contents: Tensor | None = None) -> None:
        """Gives the sequence a mark for the next `publish`: the states after `num_tokens` tokens, in a slot of their
        own. Without `contents`, it is the slot of the sequence. Does nothing without a free slot."""
        if contents is None:
            slot = sequence.state.slot
            self.pool.share(slot)
        elif self.pool.num_free:
            slot = self.pool.take()
            self._bytes_of(slot).copy_(contents)
        else:
            return
        self.tokens_seen[slot] = num_tokens
        sequence.state.marks.append((num_tokens, slot))

    def _bytes_of(self, slot: int) -> Tensor:
        assert self._memory is not None
        return self._memory[slot].view(torch.uint8)[: self.spec.state_bytes]

    def hold(self, sequence: Sequence) -> None:
        """Keeps the present states, so that `points` has them after later steps, until `release`."""
        state = sequence.state
        assert not state.pending, f"{sequence} has drafts in its journal"
        self.release(sequence)
        state.held, state.num_held = state.slot, sequence.num_computed
        if state.held >= 0:
            self.pool.share(state.held)

    def release(self, sequence: Sequence) -> None:
        """Ends `hold`."""
        self._give_back(sequence.state.held)
        sequence.state.held = -1

    def _give_back(self, slot: int) -> None:
        if slot >= 0:
            self.pool.give_back(slot)

    # -- errors --------------------------------------------------------------------------------------------------------

    def reset(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.state = SequenceState()
        self.pool.reset()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless slots are counted right, and each sequence has its states where it is."""
        held: Counter[int] = Counter()
        for sequence in sequences:
            state = sequence.state
            assert state.slot < 0 or state.slot != state.spare, f"a slot is held twice by {sequence}: {state}"
            held.update(_slots_of(state))
            seen = sequence.num_computed - state.pending
            if state.slot < 0:
                assert not sequence.num_computed and not state.pending, f"the states are lost of {sequence}: {state}"
            else:
                assert 0 <= state.pending <= self.max_drafts, f"{sequence} has a wrong count of drafts: {state}"
                assert self.tokens_seen[state.slot] == seen, (
                    f"slot {state.slot} has seen {self.tokens_seen[state.slot]} tokens, but {sequence} is at {seen}"
                )
            assert state.step is None, f"{sequence} is in a step: {state}"
        self.pool.check_integrity(held)


class NoStates:
    """For a model without states: nothing to hold."""

    pool = Pool(0)
    max_drafts = 2**31
    num_free = budget_bytes = touched_bytes = used_bytes = idle_bytes = 0

    def fill(self, kv: list[LayerBlocks]) -> list[LayerBlocks]:
        return kv

    def needed(self, sequence: Sequence) -> int:
        return 0

    def held(self, sequence: Sequence) -> int:
        return 0

    def reserve(self, sequence: Sequence) -> None:
        pass

    def plan(self, span: Span, marks: Iterable[int] = ()) -> None:
        pass

    def commit(self, sequence: Sequence, num_tokens: int) -> int:
        return num_tokens

    def points(self, sequence: Sequence, num_tokens: int) -> Iterator[StatePoint]:
        yield StatePoint(num_tokens, -1, 0)

    def enter(self, sequence: Sequence, point: StatePoint) -> None:
        pass

    def contents(self, sequence: Sequence) -> Tensor:
        raise AssertionError("a model without states has none to copy")

    def write(self, sequence: Sequence, contents: Tensor) -> None:
        raise AssertionError("a model without states has none to write")

    def restore(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def hold(self, sequence: Sequence) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass

    def reset(self, sequences: Iterable[Sequence]) -> None:
        pass

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        pass


def _slots_of(state: SequenceState) -> list[int]:
    marks = (slot for _, slot in state.marks)
    return [slot for slot in (state.slot, state.spare, state.held, *marks) if slot >= 0]


# -- the budget --------------------------------------------------------------------------------------------------------


def share_of_states(spec: KVSpec) -> Fraction:
    """Share of a cache's bytes for slots: 0 for a model without states, and nearly 1 for one without attention, whose
    blocks have no content."""
    if not spec.has_states:
        return Fraction(0)
    slot_bytes, token_bytes = spec.slots().slot_bytes, spec.block_bytes * len(spec.groups) / BLOCK_SIZE
    return max(LEAST_SHARE, Fraction(slot_bytes / (slot_bytes + STATE_TOKENS * token_bytes)))


def num_slots_of(spec: KVSpec, slots: SlotSpec, budget_bytes: int) -> int:
    """Number of slots in a cache of `budget_bytes`; the rest is for blocks."""
    return max(LEAST_SLOTS, int(share_of_states(spec) * budget_bytes) // slots.slot_bytes) if spec.has_states else 0


def budget_for(spec: KVSpec, num_tokens: int, step_tokens: int, max_drafts: int = 0) -> int:
    """A budget that is enough for a sequence of `num_tokens` tokens: blocks for all of them, and slots."""
    num_bytes, slot_bytes = most_bytes(spec, num_tokens, step_tokens), spec.slots(max_drafts).slot_bytes
    return max(math.ceil(num_bytes / (1 - share_of_states(spec))), num_bytes + LEAST_SLOTS * slot_bytes)
