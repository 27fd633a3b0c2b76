"""Which sequences get how many tokens of the next step, and who gives way when the cache is full."""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from pace.llm.sequence import Sequence, Span

HEAD_START = 64
"""Places that a unit of priority is worth: as many sequences as run at once by default."""

_place = attrgetter("place")


class Scheduler:
    """First come, first served, with a head start for priority, and prefill cut into chunks so that decoding goes on
    beside it.

    A sequence is `waiting`, `running` (gets spans), or `parked` (everything computed, nothing asked: an idle session;
    least recently used first).

    The order is by arrival, 0, 1, 2, ..., less HEAD_START for each unit of priority; among equals the earlier arrival
    is first. So one of priority p is passed by fewer than `HEAD_START * (q - p)` of those that arrive after it, where q
    is the highest priority among them, however many come: no one starves. A session has a new arrival with every
    append.

    When the pool runs out, the cached blocks of parked sequences go first, then those that waiting sequences hold, then
    those of the running sequence that is last in the order, which waits again, at its old place. A sequence that
    arrives ahead of running ones takes from them in the same way. What was dropped is computed again later, with
    bit-identical results; no tokens are lost. The first in the order can always take from all others, and the engine
    admits none that the whole pool could not hold, so every step makes progress.

    Not thread-safe: the thread that owns the engine calls it.
    """

    def __init__(
        self,
        cache: Any,
        max_tokens_per_step: int = 512,
        max_sequences_per_step: int = 64,
        max_logit_rows_per_step: int = 128,
    ) -> None:
        """`max_tokens_per_step` bounds the tokens of one model call: larger prefills faster, smaller keeps decoding
        smoother. 512 is where a GEMM no longer gains from more rows. `max_logit_rows_per_step` bounds the rows of
        logits of sequences that want one for every token (scoring), which are `4 * vocabulary` bytes each."""
        for name, value in (
            ("max_tokens_per_step", max_tokens_per_step),
            ("max_sequences_per_step", max_sequences_per_step),
            ("max_logit_rows_per_step", max_logit_rows_per_step),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int >= 1, got {value!r}")
        self.cache = cache
        self.max_tokens_per_step = max_tokens_per_step
        self.max_sequences_per_step = max_sequences_per_step
        self.max_logit_rows_per_step = max_logit_rows_per_step
        self.waiting: list[Sequence] = []
        self.running: dict[Sequence, None] = {}
        self.parked: dict[Sequence, None] = {}
        self._arrivals = itertools.count()

    def sequences(self) -> Iterator[Sequence]:
        """All that are in the engine."""
        yield from self.waiting
        yield from self.running
        yield from self.parked

    # -- coming and going ----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a new or a parked sequence, at the place it has or else at the next of its priority."""
        if sequence.place is None:
            arrival = next(self._arrivals)
            sequence.place = (arrival - HEAD_START * sequence.priority, arrival)
        insort(self.waiting, sequence, key=_place)
        self.parked.pop(sequence, None)

    def park(self, sequence: Sequence) -> None:
        """Puts a sequence among the parked ones: a new one with nothing to compute, or one that is in the order, where it
        keeps its place."""
        self.parked[sequence] = None
        self.running.pop(sequence, None)
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def resume(self, sequence: Sequence, place: tuple[int, int]) -> None:
        """Lets a parked sequence that got a token go on, at `place` in the order: at once where the cache still holds
        the rest of it, else when there is room again. Does nothing for one that is not parked."""
        if sequence not in self.parked:
            return
        sequence.place = place
        if sequence.num_pending == 1:
            self.running[sequence] = None
        else:
            insort(self.waiting, sequence, key=_place)
        self.parked.pop(sequence)

    def settle(self, sequence: Sequence) -> None:
        """After its span: hands its prompt to those that wait for it, removes it if finished, parks it if nothing is
        pending."""
        if sequence.prompt_sharers:
            self._share_prompt(sequence)
        if sequence.is_finished:
            self.remove(sequence)
        elif sequence.num_pending == 0:
            self.parked[sequence] = None
            self.running.pop(sequence)
            sequence.place = None

    def remove(self, sequence: Sequence) -> None:
        """Frees its blocks and takes it out, wherever it is. Does nothing for one that is gone already."""
        self.cache.free(sequence)
        self.running.pop(sequence, None)
        self.parked.pop(sequence, None)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.place = None
        for sharer in sequence.prompt_sharers:
            sharer.waits_for_prompt = False
        sequence.prompt_sharers.clear()

    def restart(self) -> None:
        """Sends all running sequences back to the queue, in order, after the cache was reset. Tolerates a sequence that
        a failed move left in two places; every move enters the new place before it leaves the old one."""
        self.waiting = sorted(dict.fromkeys((*self.running, *self.waiting)), key=_place)
        self.running.clear()
        for sequence in self.waiting:
            self.parked.pop(sequence, None)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Span]:
        """The spans of the next step, with room reserved in the cache; empty where nothing is to be done.

        Sequences that decode come first, one token each, then prefill chunks share what is left of
        `max_tokens_per_step`; both in order.
        """
        if self.waiting:
            self._admit()
        spans: dict[Sequence, Span] = {}
        tokens_left, rows_left = self.max_tokens_per_step, self.max_logit_rows_per_step
        prefilling = []
        for sequence in sorted(self.running, key=_place):
            if sequence.num_pending != 1:
                prefilling.append(sequence)
            elif tokens_left and self._reserve(sequence, len(sequence.tokens), spans):
                spans[sequence] = Span(sequence, sequence.num_computed, 1)
                tokens_left -= 1
        for sequence in prefilling:
            if sequence in self.running:  # it has not given way to one before it
                self.cache.reuse(sequence)
            start = sequence.num_computed
            rows_free = max(0, sequence.logits_from - start) + rows_left
            num_tokens = min(sequence.num_pending, tokens_left, rows_free)
            if num_tokens and sequence in self.running and self._reserve(sequence, start + num_tokens, spans):
                spans[sequence] = span = Span(sequence, sequence.num_computed, num_tokens)
                tokens_left -= num_tokens
                rows_left -= span.num_rows
        return list(spans.values())

    def _admit(self) -> None:
        """Moves waiting sequences to running while there is room. Those that wait for another's prompt are passed over;
        otherwise no one overtakes."""
        for sequence in list(self.waiting):
            if sequence.waits_for_prompt:
                continue
            if not self._make_room(sequence):
                return
            self.running[sequence] = None
            self.waiting.remove(sequence)
            sequence.times.admitted = sequence.times.admitted or time.perf_counter()

    def _make_room(self, sequence: Sequence) -> bool:
        """One of the `max_sequences_per_step` and room for all tokens of a waiting sequence, at the cost of idle ones
        and then, if that is enough, of running ones behind it in the order; else False."""
        behind = sorted((other for other in self.running if other.place > sequence.place), key=_place)
        while True:
            may_run = len(self.running) < self.max_sequences_per_step
            if may_run and self._has_room(sequence):
                return True
            if may_run and self._reclaim_idle(sequence):
                continue
            if not behind or not self._would_have_room(sequence, behind):
                return not self.running and self._has_room_afresh(sequence)
            self._preempt(behind.pop())

    def _would_have_room(self, sequence: Sequence, behind: list[Sequence]) -> bool:
        """Whether `_has_room` once those behind it and all idle ones have given up their blocks, as far as these are
        not shared."""
        others = [other for other in (*self.parked, *self.waiting, *behind) if other is not sequence]
        num_needed = self.cache.blocks_needed(sequence, len(sequence.tokens)) + self._blocks_to_grow(len(behind))
        return num_needed <= self.cache.num_free_blocks + sum(map(self.cache.blocks_held, others))

    def _has_room(self, sequence: Sequence) -> bool:
        """Reserves blocks for all tokens that the prefix cache does not have, if blocks to grow are then left for each
        that runs."""
        self.cache.reuse(sequence)
        num_needed = self.cache.blocks_needed(sequence, len(sequence.tokens)) + self._blocks_to_grow()
        return num_needed <= self.cache.num_free_blocks and self.cache.admit(sequence, len(sequence.tokens))

    def _has_room_afresh(self, sequence: Sequence) -> bool:
        """`_has_room` once the sequence, which is alone, has given up its own blocks. One that was cut back into a block
        that the prefix cache knows would write to a copy, for which there may be no room; it takes what is known before
        that block again, and computes the rest."""
        self.cache.free(sequence)
        return self._has_room(sequence)

    def _blocks_to_grow(self, num_leaving: int = 0) -> int:
        """That those which run take next, without the given number of them."""
        return self.cache.num_groups * (len(self.running) - num_leaving)

    def _reserve(self, sequence: Sequence, num_tokens: int, spans: dict[Sequence, Span]) -> bool:
        """Room for the sequence up to `num_tokens`, at the cost of others that have no span in this step yet. False
        where that is not enough, or where the sequence has lost its own place."""
        if sequence not in self.running:
            return False
        while not self.cache.reserve(sequence, num_tokens):
            if not self._reclaim_idle(sequence) and not self._preempt_last(sequence, spans):
                return False
        return True

    def _reclaim_idle(self, spared: Sequence) -> bool:
        """Drops the cached blocks of one sequence that does not run; False where none holds any."""
        for sequence in (*self.parked, *reversed(self.waiting)):
            if sequence.block_table and sequence is not spared:
                self.cache.free(sequence)
                return True
        return False

    def _preempt_last(self, spared: Sequence, spans: dict[Sequence, Span]) -> bool:
        """Preempts the running sequence that is last in the order, of those without a span; False where there is
        none."""
        others = [other for other in self.running if other not in spans and other is not spared]
        if others:
            self._preempt(max(others, key=_place))
        return bool(others)

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to its place in the queue. It keeps its blocks until they are reclaimed."""
        insort(self.waiting, sequence, key=_place)
        del self.running[sequence]
        sequence.times.num_preemptions += 1

    def _share_prompt(self, sequence: Sequence) -> None:
        """Once all of the prompt but its last token is computed, the sharers get those blocks and compute that token
        themselves."""
        num_shared = sequence.num_prompt_tokens - 1
        if sequence.num_computed < num_shared:
            return
        for sharer in sequence.prompt_sharers:
            sharer.waits_for_prompt = False
            if not sharer.is_finished:
                self.cache.fork(sequence, sharer, num_shared)
        sequence.prompt_sharers.clear()
