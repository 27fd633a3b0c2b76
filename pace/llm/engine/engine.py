"""The engine's step: schedule, run the model, sample, keep or drop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from pace.batch import BLOCK_SIZE
from pace.llm.cache.identity import ModelIdentity
from pace.llm.cache.manager import STEP_TOKENS, CacheManager
from pace.llm.constraints.mask_filler import NO_MASKS, NoMasks, PendingMasks
from pace.llm.engine.drafter import Drafter, NoDraft
from pace.llm.engine.forced import ForcedTokens
from pace.llm.engine.media import MAX_WHOLE_TOKENS, MEDIA_CACHE_BYTES, MediaEncoder, is_between_media, whole_media_end
from pace.llm.engine.rows import run_model
from pace.llm.engine.scheduler import Scheduler
from pace.llm.limits import checked_priority
from pace.llm.runners.batch_builder import BatchBuilder
from pace.llm.sampling.sampler import Sampler
from pace.llm.sequence import Sequence, Span
from pace.memory import format_bytes
from pace.ops.protocol import Ops


class Engine:
    """Composes the parts. A plain object without threads: its owner (an `EngineDriver`, a test, a benchmark) calls
    `submit`, then `step` until the submitted sequences are finished."""

    def __init__(
        self,
        model: Any,
        ops: Ops,
        cache: CacheManager,
        scheduler: Scheduler,
        drafter: Drafter | None = None,
        max_seq_len: int | None = None,
        media_cache_bytes: int = MEDIA_CACHE_BYTES,
    ) -> None:
        """`model` has `forward(batch)`, `vocab_size`, `max_position_embeddings`, `length_field`, `recompute_length`,
        `rope_regime`, `kept_width` and `towers`. For sequences that take rows, also `final_rows(batch)` and
        `logits(rows, routing)`; for those with adapters, `adapters`, its `AdapterSlots`. If it has any towers, also
        `encode(media)`, `angle_positions(media, start, end)`, `whole_media` and `sees_beyond_windows`. `scheduler`
        works on `cache`. `max_seq_len` is at most the model's."""
        self.model = model
        self.ops = ops
        self.cache = cache
        self.scheduler = scheduler
        self.drafter = drafter or NoDraft()
        self.sampler = Sampler(ops, model.vocab_size)
        self.forced = ForcedTokens(scheduler, model.vocab_size, model.recompute_length)
        self.media = MediaEncoder(model, media_cache_bytes)
        self._has_towers = bool(model.towers)
        scheduler.ready = self.media.ready
        if model.whole_media:
            scheduler.end_of_chunk = whole_media_end
        if model.sees_beyond_windows:
            cache.prefix.may_resume_at = is_between_media
        self.batches = BatchBuilder(model, self.media.of if model.towers else None, model.kept_width)
        self.max_seq_len = max_seq_len
        self.recompute_length = model.recompute_length
        self.max_length = min(max_seq_len or model.max_position_embeddings, cache.capacity)
        """Maximum tokens of one sequence: `max_seq_len` or the model's positions, or the capacity of the whole cache if
        that is less."""
        self.identity: ModelIdentity | None = None
        """What saved sessions must agree with; None for a model without a checkpoint."""
        self.between_steps: list[Callable[[], None]] = []
        """Called before each step. Beam search uses it to move several sequences at once."""
        self.failures: list[BaseException] = []
        """Errors of sequences that failed since the last step began."""
        self._under_way: list[Span] = []

    @classmethod
    def create(
        cls,
        model: Any,
        ops: Ops,
        cache_bytes: int,
        drafter: Drafter | None = None,
        max_seq_len: int | None = None,
        cache_options: dict[str, Any] | None = None,
        media_cache_bytes: int = MEDIA_CACHE_BYTES,
        **limits: int,
    ) -> Engine:
        """Creates an engine with a cache of at most `cache_bytes`. `cache_options` are keyword arguments of
        `CacheManager`, `limits` those of `Scheduler`."""
        step_tokens = limits.get("max_tokens_per_step", STEP_TOKENS)
        cache = CacheManager(
            model.kv_spec,
            cache_bytes,
            rope_regime=model.rope_regime,
            step_tokens=max(step_tokens, MAX_WHOLE_TOKENS) if model.whole_media else step_tokens,
            **(cache_options or {}),
        )
        return cls(model, ops, cache, Scheduler(cache, **limits), drafter, max_seq_len, media_cache_bytes)

    def explain_length_limit(self, num_tokens: int) -> str:
        """Explains why a sequence cannot have `num_tokens` tokens, more than `max_length`, and how to fix it."""
        positions, cache = self.model.max_position_embeddings, self.cache
        if num_tokens > positions:
            return f"this model has no more positions ({self.model.length_field}={positions}); shorten the text"
        if self.max_seq_len is not None and num_tokens > self.max_seq_len:
            return f"the model was loaded with max_seq_len={self.max_seq_len}; raise it, or shorten the text"
        wanted = cache.bytes_for(num_tokens) + self.drafter.bytes_for(num_tokens)
        return (
            f"the cache of {format_bytes(cache.budget_bytes)} has no room for more, at "
            f"{format_bytes(cache.num_groups * cache.spec.block_bytes / BLOCK_SIZE)} a token; "
            f"load the model with kv_cache_bytes={wanted} ({format_bytes(wanted)}) or more, or shorten the text"
        )

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Advances the scheduled sequences by one model call. Returns False if there was nothing to do.

        An exception raised by the step fails the sequences in it. The other sequences keep their tokens but lose their
        cache; the next steps recompute it.
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
        has_spans = bool(self._under_way)
        ended = self._compute(self._under_way) if has_spans else []
        self._under_way = []
        while ended:  # releases each sequence once its sink was notified
            self._end(ended.pop(0))
        return self._encode() or has_spans

    def _encode(self) -> bool:
        """Encodes a part of an image or clip, if a running sequence waits for one. Returns False if none does."""
        if not self._has_towers:
            return False
        sequence = self.media.advance(self.scheduler.in_order())
        if sequence is not None and sequence.is_finished:
            self._end(sequence)
        return sequence is not None

    def _compute(self, spans: list[Span]) -> list[Sequence]:
        """Computes one step with one model call. Returns the sequences that ended in it; only the scheduler still holds
        them."""
        if has_masks(spans):
            self.forced.extend(spans, self.cache)
            self.drafter.extend(spans, self.cache)
            with self.sampler.prepare(spans) as pending:
                outcomes, kept = self._run(spans, pending)
        else:
            self.drafter.extend(spans, self.cache)
            outcomes, kept = self._run(spans, NO_MASKS)
        for span, tokens in zip(spans, outcomes):
            self._advance(span, tokens)
        self.drafter.learn(spans, outcomes, kept)
        return [span.sequence for span in spans if span.sequence.is_finished]

    def _run(self, spans: list[Span], pending: PendingMasks | NoMasks) -> tuple[list[list[int]], Tensor | None]:
        """Runs the model and chooses tokens. Returns the tokens of each span, and the rows that the model keeps."""
        if self.cache.has_states:
            self.cache.plan(spans)
        batch = self.batches.build(spans, self.cache.kv)
        logits = run_model(self.model, batch, spans)
        return self.sampler.sample(logits, spans, pending, batch.largest), batch.kept

    def _advance(self, span: Span, tokens: list[int]) -> None:
        """Keeps the cache entries of accepted tokens and drops the rest. Appends `tokens` up to the one that stops the
        sequence."""
        sequence, length = span.sequence, len(span.sequence.tokens)
        for token in tokens:
            self._append(sequence, token)
            if sequence.finish_reason is not None or sequence.is_held:
                del sequence.logprobs[sequence.num_generated :]  # those of accepted drafts beyond the end
                break
        num_accepted = max(0, len(sequence.tokens) - length - 1)
        self.cache.commit(sequence, span.start + span.num_tokens + num_accepted)
        if span.drafts:
            sequence.stats.count_drafts(span, num_accepted)
        self.cache.publish(sequence)
        self._recompute_if_grown(sequence)
        self.scheduler.settle(sequence)

    def _append(self, sequence: Sequence, token: int) -> None:
        """Appends a generated token, checks the stopping criteria, and notifies the sink. Stopping criteria that raise
        fail only this sequence."""
        sequence.append(token)
        try:
            sequence.finish_reason = sequence.stopping.stop_now(sequence)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in a Rust library is not an Exception
            sequence.fail(error)
        logprobs, index = sequence.logprobs, len(sequence.tokens) - sequence.num_prompt_tokens - 1
        sequence.sink.token(sequence, token, logprobs[index] if index < len(logprobs) else None)

    def _recompute_if_grown(self, sequence: Sequence) -> None:
        """Drops the cache of a sequence whose generated tokens reached the length at which the model changes all RoPE
        angles. Keeps the cache of a session: its tokens come from the caller and are not generated."""
        length = self.recompute_length
        has_generated = sequence.stats.first_token is not None
        if length and has_generated and sequence.rope_length < length <= len(sequence.tokens):
            sequence.recomputed_length = length
            self.cache.free(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Removes a finished sequence and notifies its sink of the end."""
        sequence.stats.finished = time.perf_counter()
        self.scheduler.remove(sequence)
        if sequence.error is not None:
            self.failures.append(sequence.error)
        assert sequence.finish_reason is not None
        sequence.sink.end(sequence, sequence.finish_reason, sequence.error)
        if sequence.adapter:
            self._free_adapters()

    def _recover(self, error: BaseException) -> None:
        """After a failed step the cache contents are not trusted: all are dropped, and recomputed when needed."""
        failed = [span.sequence for span in self._under_way]
        for sequence in dict.fromkeys((*failed, *self._start_afresh())):
            if sequence in failed and not sequence.is_finished:
                sequence.fail(error)
            if sequence.is_finished:
                self._end(sequence)

    def _start_afresh(self) -> list[Sequence]:
        """Empties the cache and sends all running sequences back to the queue. Returns all sequences."""
        live = list(dict.fromkeys(self.scheduler.sequences()))
        self.cache.reset(live)
        self.media.reset()
        self.drafter.reset()
        self.scheduler.restart()
        self._under_way = []
        return live

    # -- calls of the owner --------------------------------------------------------------------------------------------

    def add_request(self, sequence: Sequence, priority: int = 0) -> None:
        """Queues one sequence, as `submit` does. `priority` is its head start among waiting and running sequences (see
        `Scheduler`). Raises TypeError or ValueError for an invalid priority."""
        sequence.priority = checked_priority(priority)
        self.submit([sequence])

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences; `step` must be called until they are finished. Their `max_length` is at most the engine's.
        Skips sequences that were aborted before."""
        for sequence in sequences:
            if sequence.is_finished:
                continue
            assert 0 < len(sequence.tokens) <= sequence.max_length <= self.max_length, (
                f"the engine cannot hold {sequence}"
            )
            if sequence.adapter and not self.model.adapters.holds(sequence.adapter):
                sequence.fail(ValueError("the adapter of this request was unloaded before the request began"))
                self._end(sequence)
                continue
            if self.model.whole_media:
                longest = max((placed.length for placed in sequence.media), default=0)
                if longest > self.cache.step_tokens:
                    sequence.fail(
                        ValueError(
                            f"an image has {longest} tokens, but this model computes an image at once, and at most "
                            f"{self.cache.step_tokens} tokens; make it smaller, for example with max_image_tokens"
                        )
                    )
                    self._end(sequence)
                    continue
            self.scheduler.add(sequence)

    def park(self, sequence: Sequence, num_generated: int) -> None:
        """Pauses a sequence until `go_on` and keeps only its first `num_generated` generated tokens; its owner may
        append others. To be called between two steps. The cached part is kept, as for a session."""
        assert sequence.strategy is not None, f"{sequence} was never to be generated"
        self.drafter.forget(sequence)
        self.scheduler.park(sequence)
        sequence.rollback(num_generated)
        sequence.strategy.follow(sequence.tokens)
        self.cache.truncate(sequence, len(sequence.tokens) - 1)
        if sequence.recomputed_length > len(sequence.tokens):
            sequence.recomputed_length = 0
            self.cache.free(sequence)

    def go_on(self, sequence: Sequence) -> None:
        """Resumes a parked sequence, or ends it if it is finished by now."""
        if sequence.is_finished:
            self._end(sequence)
        else:
            self._recompute_if_grown(sequence)
            self.scheduler.add(sequence)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Removes sequences and frees their blocks. Unfinished ones end as "cancelled". Harmless for finished ones."""
        for sequence in sequences:
            if sequence.is_finished:
                self.scheduler.remove(sequence)
                if sequence.adapter:
                    self._free_adapters()
            else:
                sequence.finish_reason = "cancelled"
                self._end(sequence)

    def unload_adapter(self, digest: str) -> None:
        """Unloads an adapter, as `AdapterSlots.unload`, and frees its memory when no sequence names it any more."""
        self.model.adapters.unload(digest)
        self._free_adapters()

    def _free_adapters(self) -> None:
        if self.model.adapters.has_leaving:
            self.model.adapters.free(sequence.adapter for sequence in self.scheduler.sequences())

    def fail_all(self, error: BaseException) -> None:
        """Ends every sequence with `error`, including parked ones."""
        for sequence in self._start_afresh():
            if not sequence.is_finished:
                sequence.fail(error)
            self._end(sequence)
        for move in list(self.between_steps):
            move()

    def abandon(self) -> None:
        """Ends everything in flight as "cancelled", for a process forked in the middle of a step that the parent
        continues. Parked sequences stay."""
        self.between_steps.clear()
        parked = [sequence for sequence in self.scheduler.parked if sequence.steps is None]
        for span in self._under_way:
            if span.sequence.is_finished and span.sequence.stats.finished is None:
                self._end(span.sequence)
        self.abort([sequence for sequence in self._start_afresh() if sequence not in parked])

    def check_idle(self) -> None:
        """Raises AssertionError if the engine is not idle, or if blocks are leaked, held twice, or held by no
        sequence."""
        assert not self.scheduler.running and not self.scheduler.waiting, "the engine is not idle"
        self.cache.check_integrity(self.scheduler.sequences())
        self.drafter.check_integrity()


def has_masks(spans: list[Span]) -> bool:
    """True if a sequence of the step has a mask."""
    for span in spans:  # any() takes four times as long, in each step
        if span.sequence.mask is not None:
            return True
    return False
