"""The step that everything is made of: schedule, run the model, sample, keep or drop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from pace.batch import BLOCK_SIZE
from pace.llm.cache.manager import CacheManager
from pace.llm.decoding.sampler import Sampler
from pace.llm.engine.drafter import Drafter, NoDraft
from pace.llm.engine.scheduler import Scheduler
from pace.llm.engine.turns import TurnLock
from pace.llm.runners.batch_builder import BatchBuilder
from pace.llm.sequence import Sequence, Span
from pace.memory import format_bytes
from pace.naming import argument

MOST_PRIORITY = 100
"""Either way: how many may pass a sequence is bounded."""


class Engine:
    """Composes the parts, and holds the lock that serialises them.

    Any number of threads may submit sequences and call `step` until their own are done; each step advances the
    sequences of all. The lock is held for one step at a time, in order of asking.
    """

    def __init__(
        self,
        model: Any,
        ops: Any,
        cache: CacheManager,
        scheduler: Scheduler,
        drafter: Drafter | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        """`model` has `forward(ops, batch)`, `vocab_size`, `max_position_embeddings`, `recompute_length` and
        `rope_regime`; `scheduler` works on `cache`; `max_seq_len` is at most the model's."""
        self.model = model
        self.ops = ops
        self.cache = cache
        self.scheduler = scheduler
        self.drafter = drafter or NoDraft()
        self.sampler = Sampler(ops)
        self.batches = BatchBuilder()
        self.turn = TurnLock()
        self.max_seq_len = max_seq_len
        self.max_length = min(max_seq_len or model.max_position_embeddings, cache.capacity)
        """Tokens that one sequence may have: `max_seq_len` or the model's positions, or what the whole cache holds if
        that is less."""
        self.between_steps: list[Callable[[], None]] = []
        """Called before each step, under the lock: what moves several sequences at once does it there (beam search)."""
        self._discarded: deque[Sequence] = deque()

    @classmethod
    def create(
        cls,
        model: Any,
        ops: Any,
        cache_bytes: int,
        drafter: Drafter | None = None,
        max_seq_len: int | None = None,
        cache_options: dict[str, Any] | None = None,
        **limits: int,
    ) -> Engine:
        """An engine with a cache of at most `cache_bytes`; `cache_options` are those of `CacheManager`, `limits` those
        of `Scheduler`."""
        cache = CacheManager(model.kv_spec, cache_bytes, rope_regime=model.rope_regime, **(cache_options or {}))
        return cls(model, ops, cache, Scheduler(cache, **limits), drafter, max_seq_len)

    def explain_length_limit(self, num_tokens: int) -> str:
        """Why a sequence cannot have `num_tokens` tokens, more than `max_length`, and what can be done about it."""
        positions, cache = self.model.max_position_embeddings, self.cache
        if num_tokens > positions:
            return f"this model has no more positions (max_position_embeddings={positions}); shorten the text"
        if self.max_seq_len is not None and num_tokens > self.max_seq_len:
            return (
                f"the model was loaded with {argument('max_seq_len')}={self.max_seq_len}; raise it, or shorten the text"
            )
        wanted = cache.bytes_for(num_tokens) + self.drafter.bytes_for(num_tokens)
        return (
            f"the cache of {format_bytes(cache.budget_bytes)} has no room for more, at {format_bytes(cache.bytes_for(1) / BLOCK_SIZE)} a token; "
            f"load the model with {argument('kv_cache_bytes')}={wanted} ({format_bytes(wanted)}) or more, or shorten the text"
        )

    # -- the one loop body ---------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Advances the scheduled sequences by one model call; False where there was nothing to do.

        An exception, KeyboardInterrupt included, leaves all sequences as they were before or after the step, with an
        empty cache: they go on with the next step, computing again what was dropped. Whoever called is expected to
        `abort` its own.
        """
        with self.turn:
            self.turn.is_inside = True
            try:
                return self._step()
            except BaseException:
                self._recover()
                raise
            finally:
                self.turn.is_inside = False

    def _step(self) -> bool:
        if self.turn.was_abandoned:
            self.turn.was_abandoned = False
            self._recover()
        self._discard()
        for move in list(self.between_steps):
            move()
        spans = self.scheduler.schedule()
        if not spans:
            return False
        self.drafter.extend(spans, self.cache)
        batch = self.batches.build(spans, self.cache.kv)
        logits = self.model.forward(self.ops, batch)
        outcomes = self.sampler.sample(logits, spans)
        for span, tokens in zip(spans, outcomes):
            self._advance(span, tokens)
        self.drafter.learn(spans, outcomes)
        return True

    def _advance(self, span: Span, tokens: list[int]) -> None:
        """Keeps what the span computed for accepted tokens, drops the rest, appends `tokens` up to the one that
        stops."""
        sequence, length = span.sequence, len(span.sequence.tokens)
        for token in tokens:
            sequence.append(token)
            if self._stop_if_done(sequence):
                del sequence.logprobs[sequence.num_generated :]  # of accepted drafts beyond the end
                break
        num_accepted = max(0, len(sequence.tokens) - length - 1)
        self.cache.commit(sequence, span.start + span.num_tokens + num_accepted)
        sequence.times.num_drafted += len(span.drafts)
        sequence.times.num_accepted += num_accepted
        self.cache.publish(sequence)
        self._recompute_if_grown(sequence)
        self.scheduler.settle(sequence)

    def _recompute_if_grown(self, sequence: Sequence) -> None:
        """Drops the cache of a sequence that has generated its way to where the model changes the angles of all its
        tokens. A session's tokens, which its caller gives, are not generated: it keeps what it has."""
        length = self.model.recompute_length
        has_generated = sequence.times.first_token is not None
        if length and has_generated and sequence.rope_length < length <= len(sequence.tokens):
            sequence.recomputed_length = length
            self.cache.free(sequence)

    def _stop_if_done(self, sequence: Sequence) -> bool:
        """Asks the sequence's stopping criteria; where these raise, the sequence fails alone."""
        try:
            reason = sequence.stopping.stop_now(sequence)
        except Exception as error:
            sequence.fail(error)
            return True
        if reason:
            self._finish(sequence, reason)
        return reason is not None

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.times.finished = time.perf_counter()
        sequence.finish_reason = reason

    def _recover(self) -> None:
        """After an interrupted step nothing about the cache is believed: all is dropped, and computed again when
        needed."""
        live = list(dict.fromkeys(self.scheduler.sequences()))
        self.cache.reset(live)
        self.drafter.reset()
        self.scheduler.restart()
        for sequence in live:
            if not sequence.is_finished and sequence.num_generated:
                self._stop_if_done(sequence)
            self._recompute_if_grown(sequence)
            if sequence.is_finished:
                self.scheduler.remove(sequence)

    # -- what the owners of sequences do
    # ---------------------------------------------------------------------------------

    def add_request(self, sequence: Sequence, priority: int = 0) -> None:
        """Queues one sequence, as `submit` does, from any thread, also while others run. `priority` is its head start
        among those that wait and run (`Scheduler` says how much). Raises TypeError or ValueError for a priority that is
        none."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an int from {-MOST_PRIORITY} to {MOST_PRIORITY}, got {priority!r}")
        if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
            raise ValueError(
                f"priority must be an int from {-MOST_PRIORITY} to {MOST_PRIORITY}, higher is earlier; got {priority}"
            )
        sequence.priority = priority
        self.submit([sequence])

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences; `step` must be called until they are finished. Their `max_length` is at most the
        engine's."""
        with self.turn:
            for sequence in sequences:
                assert 0 < len(sequence.tokens) <= sequence.max_length <= self.max_length, (
                    f"the engine cannot hold {sequence}"
                )
                self.scheduler.add(sequence)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences out and frees their blocks; those not finished finish as "cancelled". Harmless for finished
        ones."""
        with self.turn:
            for sequence in sequences:
                self._cancel(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        if not sequence.is_finished:
            self._finish(sequence, "cancelled")

    def discard_later(self, sequence: Sequence) -> None:
        """Has a sequence removed, now or before the next step. Waits for nothing, so a finaliser may call it at any
        moment."""
        self._discarded.append(sequence)
        self.turn.call_if_free(self._discard)

    def _discard(self) -> None:
        while self._discarded:
            self._cancel(self._discarded[0])
            self._discarded.popleft()  # afterwards: interrupted, it is still there to be removed

    def check_idle(self) -> None:
        """Raises AssertionError where nothing runs or waits and blocks are leaked, held twice, or held by no one."""
        with self.turn:
            self._discard()
            assert not self.scheduler.running and not self.scheduler.waiting, "the engine is not idle"
            self.cache.check_integrity(self.scheduler.sequences())
            self.drafter.check_integrity()
