"""Decides how many tokens each sequence gets in the next step, and which sequences are preempted when the cache is
full."""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from pace.llm.sequence import Sequence, Span

ARRIVALS_PER_PRIORITY = 64
"""Positions in the order that one unit of priority is worth: the default number of sequences in a step."""

_sort_key = attrgetter("sort_key")


class Scheduler:
    """Schedules first come, first served, with a head start for priority. Prefill is split into chunks, so that
    decoding continues during it.

    A sequence is `waiting`, `running` (gets spans), or `parked`: everything is computed and no token is wanted, as in
    an idle session. Parked sequences are in order of last use, oldest first.

    The order is by arrival, 0, 1, 2, ..., less ARRIVALS_PER_PRIORITY for each unit of priority; ties go to the earlier
    arrival. Let q be the highest priority among sequences that arrive after one of priority p. Fewer than
    `ARRIVALS_PER_PRIORITY * (q - p)` of them overtake it, however many come: no sequence starves. A session has a new
    arrival with every append.

    When the pool runs out, cached blocks of parked sequences are freed first, then those that waiting sequences hold.
    Then the running sequence that is last in the order loses its blocks and waits again, at its old position. A
    sequence that arrives ahead of running ones takes blocks from them in the same way. Dropped entries are recomputed
    later, with bit-identical results; no tokens are lost.

    The first in the order can take blocks from all others. The engine admits no sequence that the whole pool could not
    hold. So every step makes progress.

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
        smoother. At 512 a GEMM no longer gains from more rows. `max_logit_rows_per_step` bounds the rows of logits for
        sequences that want one for every token (scoring). A row takes `4 * vocabulary` bytes."""
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
        self.ready: Callable[[Sequence], int] = lambda sequence: len(sequence.tokens)
        """Returns the number of first tokens of a sequence that can be computed; it waits for rows of media before the
        others."""
        self.end_of_chunk: Callable[[Sequence, int, int], int] = lambda sequence, start, end: end
        """Returns where a chunk of a sequence with media ends that starts at `start` and should end at `end`. It may be
        elsewhere if a step must have whole images."""
        self._arrivals = itertools.count()

    def sequences(self) -> Iterator[Sequence]:
        """All sequences in the engine."""
        yield from self.waiting
        yield from self.running
        yield from self.parked

    def in_order(self) -> list[Sequence]:
        """The running sequences, first come first."""
        return sorted(self.running, key=_sort_key)

    # -- adding and removing -------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a new or parked sequence at its position in the order. Assigns a position if it has none."""
        if sequence.sort_key is None:
            arrival = next(self._arrivals)
            sequence.sort_key = (arrival - ARRIVALS_PER_PRIORITY * sequence.priority, arrival)
        insort(self.waiting, sequence, key=_sort_key)
        self.parked.pop(sequence, None)

    def park(self, sequence: Sequence) -> None:
        """Parks a sequence: a new one with nothing to compute, or one that is in the order and keeps its position."""
        self.parked[sequence] = None
        self.running.pop(sequence, None)
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def resume(self, sequence: Sequence, sort_key: tuple[int, int]) -> None:
        """Resumes a parked sequence that got a token, at `sort_key` in the order. It runs at once if the cache still
        holds the rest of it. Otherwise it waits for room. Does nothing for a sequence that is not parked."""
        if sequence not in self.parked:
            return
        sequence.sort_key = sort_key
        if sequence.num_pending == 1:
            self.running[sequence] = None
        else:
            insort(self.waiting, sequence, key=_sort_key)
        self.parked.pop(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Updates a sequence after its span: shares its prompt with waiting sharers, removes it if finished, parks it
        if nothing is pending."""
        if sequence.prompt_sharers:
            self._share_prompt(sequence)
        if sequence.is_finished:
            self.remove(sequence)
        elif sequence.num_pending == 0:
            self.parked[sequence] = None
            self.running.pop(sequence)
            sequence.sort_key = None

    def remove(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence and removes it from its queue. Does nothing for one that is already
        removed."""
        self.cache.free(sequence)
        self.running.pop(sequence, None)
        self.parked.pop(sequence, None)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.sort_key = None
        for sharer in sequence.prompt_sharers:
            sharer.waits_for_prompt = False
        sequence.prompt_sharers.clear()

    def restart(self) -> None:
        """Sends all running sequences back to the queue, in order, after the cache was reset. Tolerates a sequence that
        a failed move left in two queues; every move enters the new queue before it leaves the old one."""
        self.waiting = sorted(dict.fromkeys((*self.running, *self.waiting)), key=_sort_key)
        self.running.clear()
        for sequence in self.waiting:
            self.parked.pop(sequence, None)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Span]:
        """Returns the spans of the next step, with room reserved in the cache; empty if there is nothing to do.

        Decoding sequences come first, with one token each. Prefill chunks share the rest of `max_tokens_per_step`. Both
        are in order.
        """
        if self.waiting:
            self._admit()
        spans: dict[Sequence, Span] = {}
        tokens_left, rows_left = self.max_tokens_per_step, self.max_logit_rows_per_step
        prefilling = []
        for sequence in self.in_order():
            if sequence.num_pending != 1 or (sequence.media and self.ready(sequence) < len(sequence.tokens)):
                prefilling.append(sequence)
            elif tokens_left and self._reserve(sequence, len(sequence.tokens), spans):
                spans[sequence] = Span(sequence, sequence.num_computed, 1)
                tokens_left -= 1
        for sequence in prefilling:
            if sequence in self.running:  # not preempted for an earlier one
                self.cache.reuse(sequence)
            start = sequence.num_computed
            rows_free = tokens_left if sequence.takes_rows else max(0, sequence.logits_from - start) + rows_left
            num_tokens = min(sequence.num_pending, tokens_left, rows_free)
            if sequence.prompt_sharers and self.cache.has_states:
                num_tokens = min(num_tokens, self._num_to_share(sequence) or num_tokens)
            if sequence.media:
                num_tokens = min(num_tokens, self.ready(sequence) - start)
                if num_tokens > 0:
                    num_tokens = self.end_of_chunk(sequence, start, start + num_tokens) - start
            if num_tokens > 0 and sequence in self.running and self._reserve(sequence, start + num_tokens, spans):
                spans[sequence] = span = Span(sequence, sequence.num_computed, num_tokens)
                tokens_left = max(0, tokens_left - num_tokens)
                rows_left = max(0, rows_left - span.num_rows)
        return list(spans.values())

    @staticmethod
    def _num_to_share(sequence: Sequence) -> int:
        """Tokens until the sharers can take over: the states of the whole prompt would be no use to them."""
        return max(0, sequence.num_to_share - sequence.num_computed)

    def _admit(self) -> None:
        """Moves waiting sequences to running while there is room, in order. Skips only sequences that wait for
        another's prompt."""
        for sequence in list(self.waiting):
            if sequence.waits_for_prompt:
                continue
            if not self._make_room(sequence):
                return
            self.running[sequence] = None
            self.waiting.remove(sequence)
            sequence.stats.admitted = sequence.stats.admitted or time.perf_counter()

    def _make_room(self, sequence: Sequence) -> bool:
        """Makes room to run a waiting sequence: one of `max_sequences_per_step`, blocks for all its tokens, and a slot
        for its states. Frees those of idle sequences, then, if that is enough, of running ones later in the order.
        Returns False if there is no room."""
        behind = sorted((other for other in self.running if _sort_key(other) > _sort_key(sequence)), key=_sort_key)
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
        """True if `_has_room` would hold once idle sequences and those in `behind` have freed their room. Too
        optimistic if they share blocks or slots, which are counted once per holder."""
        others = [other for other in (*self.parked, *self.waiting, *behind) if other is not sequence]
        room = sum(map(self.cache.room_held, others), self.cache.free_room)
        return self._room_needed(sequence, leaving=behind).fits_in(room)

    def _has_room(self, sequence: Sequence) -> bool:
        """Reserves blocks for all tokens that the prefix cache does not have. Requires that each running sequence can
        still grow."""
        self.cache.reuse(sequence)
        has_room = self._room_needed(sequence).fits_in(self.cache.free_room)
        return has_room and self.cache.admit(sequence, len(sequence.tokens))

    def _has_room_afresh(self, sequence: Sequence) -> bool:
        """Calls `_has_room` after the only sequence left has freed its own blocks. A sequence truncated inside a block
        of the prefix cache would write to a copy, and there may be no room for one. It reuses the known blocks before
        that block and recomputes the rest."""
        self.cache.free(sequence)
        return self._has_room(sequence)

    def _room_needed(self, sequence: Sequence, leaving: Iterable[Sequence] = ()) -> Any:
        """Room to run a waiting sequence, and for the next token of each running one that is not in `leaving`."""
        staying = self.running.keys() - leaving
        return sum(map(self.cache.room_to_grow, staying), self.cache.room_needed(sequence, len(sequence.tokens)))

    def _reserve(self, sequence: Sequence, num_tokens: int, spans: dict[Sequence, Span]) -> bool:
        """Reserves room up to `num_tokens`, and preempts sequences that have no span in this step yet if needed.
        Returns False if that is not enough or the sequence itself was preempted."""
        if sequence not in self.running:
            return False
        while not self.cache.reserve(sequence, num_tokens):
            if not self._reclaim_idle(sequence) and not self._preempt_last(sequence, spans):
                return False
        return True

    def _reclaim_idle(self, spared: Sequence) -> bool:
        """Frees the cached blocks of one sequence that does not run. Returns False if none holds any."""
        for sequence in (*self.parked, *reversed(self.waiting)):
            if sequence.block_table and sequence is not spared:
                self.cache.free(sequence)
                return True
        return False

    def make_idle_room(self, sequence: Sequence, take: Callable[[], bool]) -> bool:
        """Calls `take`, which takes room for a parked sequence, until it returns True. Frees the room of one other idle
        sequence after each failure. Returns False if there is none left."""
        while not take():
            if not self._reclaim_idle(sequence):
                return False
        return True

    def _preempt_last(self, spared: Sequence, spans: dict[Sequence, Span]) -> bool:
        """Preempts the last running sequence in the order among those without a span. Returns False if there is
        none."""
        others = [other for other in self.running if other not in spans and other is not spared]
        if others:
            self._preempt(max(others, key=_sort_key))
        return bool(others)

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to its position in the queue. It keeps its blocks until they are reclaimed."""
        insort(self.waiting, sequence, key=_sort_key)
        del self.running[sequence]
        sequence.stats.num_preemptions += 1

    def _share_prompt(self, sequence: Sequence) -> None:
        """Shares the prompt's blocks once all tokens to share are computed. The sharers compute the rest themselves."""
        num_shared = sequence.num_to_share
        if sequence.num_computed < num_shared:
            return
        for sharer in sequence.prompt_sharers:
            sharer.waits_for_prompt = False
            if not sharer.is_finished:
                self.cache.fork(sequence, sharer, num_shared)
        sequence.prompt_sharers.clear()
