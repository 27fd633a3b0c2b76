"""Drafts from a small model that reads the target's own rows: a layer for multi-token prediction, or EAGLE-3."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE, LayerBlocks
from pace.llm.runners.batch_builder import BatchBuilder
from pace.llm.sequence import Sequence, Span
from pace.llm.speculation.draft_model import DraftModel


class HeadShadow(Sequence):
    """A sequence in the cache of a draft head. Each token has the target's row of the token before it, so the first
    token of the sequence is left out."""

    def __init__(self, sequence: Sequence, start: int, max_length: int, width: int) -> None:
        """`start`: index of the token with the first row. `width`: elements of a row."""
        super().__init__(sequence.tokens[1 : start + 1], strategy=None, stopping=None, max_length=max_length)
        self.num_prompt_tokens = sequence.num_prompt_tokens
        self.recomputed_length = sequence.recomputed_length
        # The target's rows depend on its adapters. The head itself has none.
        self.media = tuple(replace(span, start=span.start - 1) for span in sequence.media)
        self.cache_salt = f"{sequence.tokens[0]} {sequence.adapter or ''} {sequence.cache_salt or ''}"
        self.next = start
        """Index of the token with the next row."""
        self.rows = torch.empty(0, width)
        """Rows of the tokens that are not computed yet."""
        self.inputs = torch.empty(0, 0)
        """Inputs of these tokens in the target, without the last one's. Without columns for a head that does not see
        them."""

    def cut(self, num_tokens: int) -> None:
        """Drops the tokens from `num_tokens` on. They have no rows."""
        del self.tokens[num_tokens:]

    def add(self, tokens: list[int], rows: Tensor, inputs: Tensor) -> None:
        """Appends tokens with their rows, which are copied. `inputs`: those of the tokens before them."""
        self.tokens += tokens
        self.rows = torch.cat([self.rows, rows])
        known = torch.cat([self.inputs, inputs]) if len(self.inputs) else inputs
        self.inputs = known[len(known) - len(self.rows) + 1 :].clone()
        self.next += len(tokens)

    def drop(self, num_rows: int) -> None:
        """Drops the first rows, of tokens that are computed."""
        self.rows, self.inputs = self.rows[num_rows:].clone(), self.inputs[num_rows:].clone()


class DraftHead(DraftModel):
    """`DraftSource` whose model reads, for each token, the row that the target computed for the token before it.

    A shadow collects the rows of each step. The head reads them when it drafts, or when they fill a block. The first
    draft follows from the target's rows, further ones from the head's own, which are dropped after the step.

    Rows of tokens that the target took from its prefix cache, or that its fork shares, are never computed. The head
    then uses its own prefix cache, and skips the tokens that are missing there: drafts are poorer."""

    def make_batches(self) -> BatchBuilder:
        return BatchBuilder(self.model, kept_width=self.model.kept_width, given_width=self.model.model.given_width)

    @property
    def _num_inputs(self) -> int:
        """Columns of the target's inputs in its rows, and in the given rows; 0 for a head that does not see them."""
        model = self.model.model
        return model.hidden_size if model.sees_inputs else 0

    # -- calls of the drafter ------------------------------------------------------------------------------------------

    def kind(self, sequence: Sequence, most: int) -> int | None:
        """Returns 0, the only kind; None if rows of the sequence are missing."""
        shadow = self._shadows.get(sequence)
        if shadow is None or shadow.next != len(sequence.tokens) - 1 or not shadow.num_pending:
            return None
        return 0 if len(shadow.tokens) + most <= self.max_length else None

    def propose(
        self, sequences: list[Sequence], lengths: list[int], kv: list[LayerBlocks] | None = None
    ) -> list[list[int]]:
        shadows = [self._shadows[sequence] for sequence in sequences]
        num_known = [len(shadow.tokens) for shadow in shadows]
        proposals = super().propose(sequences, lengths)
        for shadow, count in zip(shadows, num_known):
            if shadow.num_computed >= count:  # it has drafted
                self.cache.truncate(shadow, count)
                shadow.cut(count)
                shadow.drop(len(shadow.rows))
        return proposals

    def observe(self, spans: list[Span], outcomes: list[list[int]], kept: Tensor) -> None:
        if not any(map(self._drafts_for, spans)):
            return
        inputs, rows = kept.split([self._num_inputs, kept.shape[1] - self._num_inputs], 1)
        rows = self._encode(rows)
        first, full = 0, []
        for span in spans:
            if self._drafts_for(span):
                sequence, shadow = span.sequence, self._shadow_of(span)
                start, end = shadow.next, min(span.end, len(sequence.tokens) - 1)
                if start < end:
                    of_span = slice(first + start - span.start, first + end - span.start)
                    shadow.add(sequence.tokens[start + 1 : end + 1], rows[of_span], inputs[of_span])
                if shadow.num_pending > BLOCK_SIZE:
                    full.append(sequence)
            first += span.end - span.start
        if full:
            self._read(full)
        if len(self._shadows) > 2 * len(spans) + 16:
            self._forget_finished()

    def check_integrity(self) -> None:
        self._forget_finished()
        super().check_integrity()

    def _forget_finished(self) -> None:
        """Drops the shadows of sequences that were aborted before they drafted."""
        for sequence in [sequence for sequence in self._shadows if sequence.is_finished]:
            self.forget(sequence)

    def settle(self, sequence: Sequence, num_valid: int) -> None:
        pass

    @staticmethod
    def _drafts_for(span: Span) -> bool:
        """True if the sequence of a span may get drafts, now or later."""
        strategy = span.sequence.strategy
        return strategy is not None and strategy.takes_drafts and not span.sequence.is_finished

    # -- shadows -------------------------------------------------------------------------------------------------------

    def _shadow_of(self, span: Span) -> HeadShadow:
        """Returns the shadow of a span's sequence. It is a new one if there is none, or if rows between it and the span
        are missing. So it is if the shadow is full, or if all angles of the sequence have changed."""
        sequence = span.sequence
        shadow = self._shadows.get(sequence)
        if (
            shadow is None
            or shadow.next < span.start
            or shadow.recomputed_length != sequence.recomputed_length
            or len(shadow.tokens) + span.end - span.start > self.max_length
        ):
            self.forget(sequence)
            shadow = HeadShadow(sequence, span.start, self.max_length, self.model.kept_width)
            self._reuse(shadow)
            self._shadows[sequence] = shadow
        return shadow

    def _reuse(self, shadow: HeadShadow) -> None:
        """Takes what is known of the tokens of a new shadow, and drops the others."""
        if shadow.tokens:
            shadow.wanted_from = len(shadow.tokens)  # no logits
            self.cache.reuse(shadow)
            shadow.wanted_from = None
            shadow.cut(shadow.num_computed)

    def _encode(self, rows: Tensor) -> Tensor:
        """Converts rows that the target kept to rows that the head reads."""
        return self.model.model.encode(self.model.run_slice, rows)

    def _read(self, sequences: list[Sequence]) -> None:
        """Computes all tokens but the last of the sequences' shadows. Drops shadows for which there is no room."""
        spans = []
        for sequence in sequences:
            shadow = self._shadows[sequence]
            if self._admit(shadow, len(shadow.tokens), sequences):
                spans.append(Span(shadow, shadow.num_computed, shadow.num_pending - 1))
            else:
                self.forget(sequence)
        if not spans:
            return
        self._forward(spans)
        for sequence in sequences:
            if sequence in self._shadows:
                self.cache.publish(self._shadows[sequence])

    def _num_unread(self, sequence: Sequence) -> int:
        return self._shadows[sequence].num_pending

    def _make_room(self, sequence: Sequence, length: int, spared: Container[Sequence]) -> bool:
        shadow = self._shadows[sequence] = self._shadows.pop(sequence)  # the last used is last
        return self._admit(shadow, len(shadow.tokens) + length - len(sequence.tokens), spared)

    def _catch_up(self, sequences: list[Sequence]) -> list[Sequence]:
        return sequences

    # -- the model -----------------------------------------------------------------------------------------------------

    def _run(self, spans: list[Span]) -> Tensor:
        """Computes the spans from the rows of their shadows. The row of the last token becomes that of the next one, if
        all are computed."""
        batch = self._batches.build(spans, self.cache.kv)
        width, first = self.model.kept_width, 0
        if self._num_inputs:
            batch.given.rows[:, width:] = self.model.model.embeddings(batch.tokens)
        for span in spans:
            shadow, end = span.sequence, first + span.num_tokens
            batch.given.rows[first:end, :width] = shadow.rows[: span.num_tokens]
            known = shadow.inputs[: span.num_tokens]
            batch.given.rows[first : first + len(known), width:] = known
            first = end
        logits = self.model.forward(batch)
        last = 0
        for span in spans:
            shadow, last = span.sequence, last + span.num_tokens
            shadow.drop(span.num_tokens)
            if span.end == len(shadow.tokens):
                shadow.rows = batch.kept[last - 1 : last].clone()
        return logits

    def _of_target(self, logits: Tensor) -> Tensor:
        return super()._of_target(self.model.model.to_target(logits))
