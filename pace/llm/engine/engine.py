"""The step that everything is made of: schedule, run the model, sample, keep or drop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from pace.batch import BLOCK_SIZE
from pace.llm.cache.manager import STEP_TOKENS, CacheManager
from pace.llm.decoding.mask_filler import NO_MASKS
from pace.llm.decoding.sampler import Sampler
from pace.llm.engine.drafter import Drafter, NoDraft
from pace.llm.engine.forced import ForcedTokens
from pace.llm.engine.scheduler import Scheduler
from pace.llm.runners.batch_builder import BatchBuilder
from pace.llm.sequence import Sequence, Span
from pace.memory import format_bytes

MOST_PRIORITY = 100
"""Either way: how many may pass a sequence is bounded."""
MOST_SALT = 128
"""Characters of a cache salt."""


class Engine:
    """Composes the parts. A plain object without threads: whoever owns it (an `EngineDriver`, a test, a benchmark) calls
    `submit`, and `step` until what was submitted is done."""

    def __init__(
        self,
        model: Any,
        ops: Any,
        cache: CacheManager,
        scheduler: Scheduler,
        drafter: Drafter | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        """`model` has `forward(batch)`, `vocab_size`, `max_position_embeddings`, `recompute_length` and
        `rope_regime`; `scheduler` works on `cache`; `max_seq_len` is at most the model's."""
        self.model = model
        self.ops = ops
        self.cache = cache
        self.scheduler = scheduler
        self.drafter = drafter or NoDraft()
        self.sampler = Sampler(ops, model.vocab_size)
        self.forced = ForcedTokens(scheduler, model.vocab_size, model.recompute_length)
        self.batches = BatchBuilder()
        self.max_seq_len = max_seq_len
        self.recompute_length = model.recompute_length
        self.max_length = min(max_seq_len or model.max_position_embeddings, cache.capacity)
        """Tokens that one sequence may have: `max_seq_len` or the model's positions, or what the whole cache holds if
        that is less."""
        self.between_steps: list[Callable[[], None]] = []
        """Called before each step: what moves several sequences at once does it there (beam search)."""
        self.failures: list[BaseException] = []
        """What sequences failed with since the last step began."""
        self._under_way: list[Span] = []

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
        cache = CacheManager(
            model.kv_spec,
            cache_bytes,
            rope_regime=model.rope_regime,
            step_tokens=limits.get("max_tokens_per_step", STEP_TOKENS),
            **(cache_options or {}),
        )
        return cls(model, ops, cache, Scheduler(cache, **limits), drafter, max_seq_len)

    def explain_length_limit(self, num_tokens: int) -> str:
        """Why a sequence cannot have `num_tokens` tokens, more than `max_length`, and what can be done about it."""
        positions, cache = self.model.max_position_embeddings, self.cache
        if num_tokens > positions:
            return f"this model has no more positions (max_position_embeddings={positions}); shorten the text"
        if self.max_seq_len is not None and num_tokens > self.max_seq_len:
            return f"the model was loaded with max_seq_len={self.max_seq_len}; raise it, or shorten the text"
        wanted = cache.bytes_for(num_tokens) + self.drafter.bytes_for(num_tokens)
        return (
            f"the cache of {format_bytes(cache.budget_bytes)} has no room for more, at {format_bytes(cache.bytes_for(1) / BLOCK_SIZE)} a token; "
            f"load the model with kv_cache_bytes={wanted} ({format_bytes(wanted)}) or more, or shorten the text"
        )

    # -- the one loop body ---------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Advances the scheduled sequences by one model call; False where there was nothing to do.

        What the step raises fails the sequences it worked on. The others are as they were, with an empty cache: they
        compute again what was dropped, and go on with the next step.
        """
        self.failures.clear()
        try:
            return self._step()
        except BaseException as error:
            self._recover(error)
            raise

    def _step(self) -> bool:
        for move in list(self.between_steps):
            move()
        self._under_way = self.scheduler.schedule()
        if not self._under_way:
            return False
        ended = self._compute(self._under_way)
        self._under_way = []
        while ended:  # each is let go of as its owner hears of its end
            self._end(ended.pop(0))
        return True

    def _compute(self, spans: list[Span]) -> list[Sequence]:
        """Computes one step by one model call. Returns the sequences that ended in it, which nothing in the engine holds any
        more but the scheduler."""
        has_masks = any(span.sequence.mask is not None for span in spans)
        if has_masks:
            self.forced.extend(spans, self.cache)
        self.drafter.extend(spans, self.cache)
        with self.sampler.prepare(spans) if has_masks else NO_MASKS as pending:
            batch = self.batches.build(spans, self.cache.kv)
            logits = self.model.forward(batch)
            outcomes = self.sampler.sample(logits, spans, pending)
        for span, tokens in zip(spans, outcomes):
            self._advance(span, tokens)
        self.drafter.learn(spans, outcomes)
        return [span.sequence for span in spans if span.sequence.is_finished]

    def _advance(self, span: Span, tokens: list[int]) -> None:
        """Keeps what the span computed for accepted tokens, drops the rest, appends `tokens` up to the one that
        stops."""
        sequence, length = span.sequence, len(span.sequence.tokens)
        for token in tokens:
            self._append(sequence, token)
            if sequence.finish_reason is not None or sequence.is_held:
                del sequence.logprobs[sequence.num_generated :]  # of accepted drafts beyond the end
                break
        num_accepted = max(0, len(sequence.tokens) - length - 1)
        self.cache.commit(sequence, span.start + span.num_tokens + num_accepted)
        if span.drafts:
            sequence.times.count_drafts(span, num_accepted)
        self.cache.publish(sequence)
        self._recompute_if_grown(sequence)
        self.scheduler.settle(sequence)

    def _append(self, sequence: Sequence, token: int) -> None:
        """Adds a generated token, asks whether it is the last, and tells of it. Stopping criteria that raise fail the
        sequence alone."""
        sequence.append(token)
        try:
            sequence.finish_reason = sequence.stopping.stop_now(sequence)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            sequence.fail(error)
        logprobs, index = sequence.logprobs, len(sequence.tokens) - sequence.num_prompt_tokens - 1
        sequence.sink.token(sequence, token, logprobs[index] if index < len(logprobs) else None)

    def _recompute_if_grown(self, sequence: Sequence) -> None:
        """Drops the cache of a sequence that has generated its way to where the model changes the angles of all its
        tokens. A session's tokens, which its caller gives, are not generated: it keeps what it has."""
        length = self.recompute_length
        has_generated = sequence.times.first_token is not None
        if length and has_generated and sequence.rope_length < length <= len(sequence.tokens):
            sequence.recomputed_length = length
            self.cache.free(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Takes a finished sequence out, and tells of its end."""
        sequence.times.finished = time.perf_counter()
        self.scheduler.remove(sequence)
        if sequence.error is not None:
            self.failures.append(sequence.error)
        sequence.sink.end(sequence, sequence.finish_reason, sequence.error)

    def _recover(self, error: BaseException) -> None:
        """After a failed step nothing about the cache is believed: all is dropped, and computed again when needed."""
        failed = [span.sequence for span in self._under_way]
        for sequence in dict.fromkeys((*failed, *self._start_afresh())):
            if sequence in failed and not sequence.is_finished:
                sequence.fail(error)
            if sequence.is_finished:
                self._end(sequence)

    def _start_afresh(self) -> list[Sequence]:
        """Empties the cache, and has all sequences, which it returns, wait for it."""
        live = list(dict.fromkeys(self.scheduler.sequences()))
        self.cache.reset(live)
        self.drafter.reset()
        self.scheduler.restart()
        self._under_way = []
        return live

    # -- what the owner does -------------------------------------------------------------------------------------------

    def add_request(self, sequence: Sequence, priority: int = 0) -> None:
        """Queues one sequence, as `submit` does. `priority` is its head start among those that wait and run (`Scheduler`
        says how much). Raises TypeError or ValueError for a priority that is none."""
        sequence.priority = checked_priority(priority)
        self.submit([sequence])

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences; `step` must be called until they are finished. Their `max_length` is at most the engine's.
        One that was aborted before is left out."""
        for sequence in sequences:
            if sequence.is_finished:
                continue
            assert 0 < len(sequence.tokens) <= sequence.max_length <= self.max_length, (
                f"the engine cannot hold {sequence}"
            )
            self.scheduler.add(sequence)

    def park(self, sequence: Sequence, num_generated: int) -> None:
        """Between two steps: keeps a sequence from going on until `go_on`, with its first generated tokens alone, to
        which its owner may add others. Its cached part is kept as that of a session is."""
        self.drafter.forget(sequence)
        self.scheduler.park(sequence)
        sequence.take_back(num_generated)
        sequence.strategy.follow(sequence.tokens)
        self.cache.truncate(sequence, len(sequence.tokens) - 1)
        if sequence.recomputed_length > len(sequence.tokens):
            sequence.recomputed_length = 0
            self.cache.free(sequence)

    def go_on(self, sequence: Sequence) -> None:
        """Lets a parked sequence go on, or ends it where it is finished by now."""
        if sequence.is_finished:
            self._end(sequence)
        else:
            self._recompute_if_grown(sequence)
            self.scheduler.add(sequence)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences out and frees their blocks; those not finished finish as "cancelled". Harmless for finished
        ones."""
        for sequence in sequences:
            if sequence.is_finished:
                self.scheduler.remove(sequence)
            else:
                sequence.finish_reason = "cancelled"
                self._end(sequence)

    def fail_all(self, error: BaseException) -> None:
        """Ends every sequence with `error`, those included that are parked."""
        for sequence in self._start_afresh():
            if not sequence.is_finished:
                sequence.fail(error)
            self._end(sequence)
        for move in list(self.between_steps):
            move()

    def abandon(self) -> None:
        """Ends what is in flight as "cancelled", in whatever state a step is that another process goes on with. What is
        parked stays."""
        self.between_steps.clear()
        parked = [sequence for sequence in self.scheduler.parked if sequence.steps is None]
        for span in self._under_way:
            if span.sequence.is_finished and span.sequence.times.finished is None:
                self._end(span.sequence)
        self.abort([sequence for sequence in self._start_afresh() if sequence not in parked])

    def check_idle(self) -> None:
        """Raises AssertionError where nothing runs or waits and blocks are leaked, held twice, or held by no one."""
        assert not self.scheduler.running and not self.scheduler.waiting, "the engine is not idle"
        self.cache.check_integrity(self.scheduler.sequences())
        self.drafter.check_integrity()


def checked_salt(cache_salt: Any) -> str | None:
    """Raises TypeError or ValueError for a salt that is none."""
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise TypeError(f"cache_salt must be a string or None, got {cache_salt!r:.100}")
    if cache_salt is not None and not 1 <= len(cache_salt) <= MOST_SALT:
        raise ValueError(f"cache_salt must have 1 to {MOST_SALT} characters, got {len(cache_salt)}")
    return cache_salt


def checked_priority(priority: Any) -> int:
    """Raises TypeError or ValueError for a priority that is none."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority must be an int from {-MOST_PRIORITY} to {MOST_PRIORITY}, got {priority!r}")
    if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
        raise ValueError(
            f"priority must be an int from {-MOST_PRIORITY} to {MOST_PRIORITY}, higher is earlier; got {priority}"
        )
    return priority
