"""Drafts from a smaller model: token by token, or all at once from a model trained with mask tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

from torch import Tensor

from pace.batch import BLOCK_SIZE, LayerBlocks
from pace.llm.cache.manager import CacheManager
from pace.llm.engine.drafter import DraftMemory
from pace.llm.runners.batch_builder import BatchBuilder
from pace.llm.sequence import Sequence, Span
from pace.llm.speculation.draft_writer import DraftWriter
from pace.ops.protocol import Ops

CATCH_UP_TOKENS = 512
"""Tokens of new sequences that the draft model reads in one step, for all sequences together. Equal to the scheduler's
limit for prefill, so that other sequences do not wait longer than for a prefill chunk."""

AMORTISED_OVER = 64
"""Tokens over which the cost of reading a new sequence is spread; fewer if fewer are left to generate."""


def most_read(num_drafts: int) -> int:
    """Maximum number of tokens of one sequence that a draft model reads between two calls of `admit`, if it writes at
    most `num_drafts` drafts."""
    return CATCH_UP_TOKENS + BLOCK_SIZE + num_drafts


class DraftModel(DraftWriter):
    """`DraftSource` in which a smaller model writes the drafts, one token of every sequence at a time.

    Each sequence has a shadow in the draft model's own cache: the same tokens, then drafts, truncated to the valid ones
    after the step. A shadow that falls behind (nothing was drafted for a while) reads the missing tokens before its
    next draft. All sequences together read `CATCH_UP_TOKENS` a step. If the cache is full, the shadow unused for
    longest is dropped."""

    def __init__(
        self,
        model: Any,
        ops: Ops,
        cache: CacheManager,
        vocab_size: int,
        weights: dict[str, int],
        weight_counts: dict[str, int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The arguments of `DraftWriter`, and the draft model's own `cache`."""
        super().__init__(model, ops, vocab_size, weights, weight_counts, clock)
        self.cache = cache
        self.max_length = min(model.max_position_embeddings, cache.capacity)
        self._batches = self.make_batches()
        self._shadows: dict[Sequence, Sequence] = {}  # the last used is last

    def make_batches(self) -> BatchBuilder:
        """Makes the builder of the model's batches."""
        return BatchBuilder()

    # -- calls of the drafter ------------------------------------------------------------------------------------------

    def kind(self, sequence: Sequence, most: int) -> int | None:
        """Returns 0, the only kind; None if the sequence gets too long for the draft model."""
        return 0 if len(sequence.tokens) + most <= self.max_length else None

    def seconds(self, sequences: list[Sequence], lengths: list[int]) -> float:
        """Returns the measured cost of the forward passes, and a share of reading tokens new to the draft model."""
        seconds = super().seconds(sequences, lengths)
        for sequence, length in zip(sequences, lengths):
            if length:
                num_unread = self._num_unread(sequence)
                if num_unread > BLOCK_SIZE:
                    seconds += (self.costs.at(num_unread) or 0.0) / max(
                        1, min(AMORTISED_OVER, sequence.max_length - len(sequence.tokens))
                    )
        return seconds

    def propose(
        self, sequences: list[Sequence], lengths: list[int], kv: list[LayerBlocks] | None = None
    ) -> list[list[int]]:
        self._spent = 0.0
        proposals: dict[Sequence, list[int]] = {}
        wanted = {sequence: length for sequence, length in zip(sequences, lengths) if length}
        for sequence, length in wanted.items():
            if self._make_room(sequence, len(sequence.tokens) + length, wanted):
                proposals[sequence] = []
        ready = self._catch_up(list(proposals))
        self._draft(ready, [wanted[sequence] for sequence in ready], proposals)
        return [proposals.get(sequence, []) for sequence in sequences]

    def observe(self, spans: list[Span], outcomes: list[list[int]], kept: Tensor) -> None:
        pass

    def settle(self, sequence: Sequence, num_valid: int) -> None:
        shadow = self._shadows.get(sequence)
        if shadow is not None:
            self.cache.truncate(shadow, min(shadow.num_computed, num_valid))
            del shadow.tokens[num_valid:]

    def forget(self, sequence: Sequence) -> None:
        shadow = self._shadows.pop(sequence, None)
        if shadow is not None:
            self.cache.free(shadow)

    def reset(self) -> None:
        self.cache.reset(self._shadows.values())
        self._shadows.clear()

    def check_integrity(self) -> None:
        assert not [sequence for sequence in self._shadows if sequence.is_finished], (
            "a shadow is kept of a sequence that is done"
        )
        self.cache.check_integrity(self._shadows.values())

    def bytes_for(self, num_tokens: int) -> int:
        return self.cache.bytes_for(num_tokens)

    def memory(self) -> DraftMemory:
        return DraftMemory(
            self._weights, self._weight_counts, self.cache.used_bytes, self.cache.touched_bytes, self.cache.budget_bytes
        )

    # -- drafting ------------------------------------------------------------------------------------------------------

    def _draft(self, sequences: list[Sequence], lengths: list[int], proposals: dict[Sequence, list[int]]) -> None:
        """Adds `lengths` tokens to the proposals of sequences that are read except for a few tokens."""
        shadows = [self._shadows[sequence] for sequence in sequences]
        for depth in range(max(lengths, default=0)):
            if depth == 1:
                self._hold(shadows, lengths, proposals)
            live = [index for index, length in enumerate(lengths) if length > depth]
            if not live:
                return
            spans = [Span(shadows[index], shadows[index].num_computed, shadows[index].num_pending) for index in live]
            logits = self._forward(spans)
            largest = self.ops.argmax(logits).tolist()
            for row, index in enumerate(live):
                sequence = sequences[index]
                token = self._pick(sequence, logits[row], largest[row], depth)
                if token is None:
                    lengths[index] = 0
                    continue
                shadows[index].tokens.append(token)
                proposals[sequence].append(token)

    def _hold(self, shadows: list[Sequence], lengths: list[int], spared: Container[Sequence]) -> None:
        """Keeps the states before the first draft is read, to go back to if drafts are rejected. Sets lengths to 1
        where there is no room for that."""
        for index, (shadow, length) in enumerate(zip(shadows, lengths)):
            if length > 1:
                self.cache.hold(shadow)
                if not self._admit(shadow, shadow.num_computed + length, spared):
                    lengths[index] = 1

    # -- shadows -------------------------------------------------------------------------------------------------------

    def _num_unread(self, sequence: Sequence) -> int:
        shadow = self._shadows.get(sequence)
        return len(sequence.tokens) - (shadow.num_computed if shadow else 0)

    def _make_room(self, sequence: Sequence, length: int, spared: Container[Sequence]) -> bool:
        """Gives the sequence a shadow with its tokens and room for `length`, dropping shadows not in `spared` if
        needed. Returns False without room, or if the sequence has a token outside the draft model's vocabulary."""
        shadow = self._shadows.pop(sequence, None) or self._new_shadow(sequence)
        self._shadows[sequence] = shadow
        new = sequence.tokens[len(shadow.tokens) :]
        if max(new, default=0) >= self.model.vocab_size:
            return False
        shadow.tokens += new
        self._read_again_if_grown(shadow)
        return self._admit(shadow, length, spared)

    def _admit(self, shadow: Sequence, length: int, spared: Container[Sequence]) -> bool:
        """Makes room for `length` tokens, dropping shadows not in `spared` if needed. Returns False without room."""
        while not self.cache.admit(shadow, length):
            victim = next(
                (other for other, held in self._shadows.items() if other not in spared and held.block_table), None
            )
            if victim is None:
                return False
            self.forget(victim)
        return True

    def _new_shadow(self, sequence: Sequence) -> Sequence:
        shadow = Sequence([], strategy=None, stopping=None, max_length=self.max_length)
        shadow.num_prompt_tokens = sequence.num_prompt_tokens
        return shadow

    def _read_again_if_grown(self, shadow: Sequence) -> None:
        """Frees the cache of a shadow that reached the length at which its model changes all RoPE angles, as the engine
        does."""
        length = self.model.recompute_length
        if length and shadow.rope_length < length <= len(shadow.tokens):
            shadow.recomputed_length = length
            self.cache.free(shadow)

    def _catch_up(self, sequences: list[Sequence]) -> list[Sequence]:
        """Lets the draft model read missing tokens, up to the limit per step. Returns the sequences that may draft
        now."""
        tokens_left, spans, ready = CATCH_UP_TOKENS, [], []
        for sequence in sequences:
            shadow = self._shadows[sequence]
            num_behind = shadow.num_pending - BLOCK_SIZE
            num_tokens = min(shadow.num_pending - 1, tokens_left) if num_behind > 0 else 0
            if num_tokens > 0:
                spans.append(Span(shadow, shadow.num_computed, num_tokens))
                tokens_left -= num_tokens
            if num_behind <= 0 or num_tokens == shadow.num_pending - 1:
                ready.append(sequence)
        if spans:
            self._forward(spans)
        return ready

    def _forward(self, spans: list[Span]) -> Tensor:
        """Computes the spans. Returns the logits of the wanted rows, cut to the target's vocabulary."""
        begin = self._clock()
        self.cache.plan(spans)
        logits = self._run(spans)
        self._spent += self.costs.add(sum(span.end - span.start for span in spans), self._clock() - begin)
        for span in spans:
            self.cache.commit(span.sequence, span.start + span.num_tokens)
        return self._of_target(logits)

    def _run(self, spans: list[Span]) -> Tensor:
        """Returns the logits of the spans' wanted rows."""
        return self.model.forward(self._batches.build(spans, self.cache.kv))


class ParallelDraftModel(DraftModel):
    """`DraftSource` for models trained as in arXiv 2504.18583 (PARD). One forward pass computes the sequence and `k -
    1` mask tokens; the last k rows are the k drafts. The cache treats the masks as drafts, and drops them."""

    def __init__(self, mask_token_id: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.mask_token_id = mask_token_id

    def _passes(self, lengths: list[int]) -> list[int]:
        return [sum(lengths)]

    def _draft(self, sequences: list[Sequence], lengths: list[int], proposals: dict[Sequence, list[int]]) -> None:
        if not sequences:
            return
        spans = []
        for sequence, length in zip(sequences, lengths):
            shadow = self._shadows[sequence]
            masks = [self.mask_token_id] * (length - 1)
            spans.append(Span(shadow, shadow.num_computed, shadow.num_pending, masks))
        logits = self._forward(spans)
        largest = self.ops.argmax(logits).tolist()
        row = 0
        for sequence, length in zip(sequences, lengths):
            picked = [self._pick(sequence, logits[row + depth], largest[row + depth], depth) for depth in range(length)]
            row += length
            proposals[sequence] += picked[: picked.index(None)] if None in picked else picked
