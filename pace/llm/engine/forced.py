"""Forced tokens: a step computes all tokens together that a sequence's mask makes certain."""

from __future__ import annotations

from typing import Any

from pace.llm.engine.drafter import fit_drafts
from pace.llm.engine.scheduler import Scheduler
from pace.llm.sequence import Span


class ForcedTokens:
    """Adds drafts to the spans: the tokens that the sequence's mask makes certain.

    They are treated like other drafts. The cache has room for them, and those after a token that ends the sequence are
    dropped.
    No logits are computed for rows that the strategy does not need.
    """

    def __init__(self, scheduler: Scheduler, vocab_size: int, recompute_length: int | None) -> None:
        """`scheduler` gives the limits of tokens and rows in a step; the others are the model's."""
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._recompute_length = recompute_length

    def extend(self, spans: list[Span], cache: Any) -> None:
        tokens_left = self._scheduler.max_tokens_per_step - sum(span.num_tokens for span in spans)
        rows_left = self._scheduler.max_logit_rows_per_step - sum(span.num_rows for span in spans)
        for span in spans:
            sequence, mask, strategy = span.sequence, span.sequence.mask, span.sequence.strategy
            if mask is None or strategy is None or not strategy.takes_drafts:
                continue
            if span.start + span.num_tokens < len(sequence.tokens):
                continue
            tokens = mask.forced_after(sequence, self._vocab_size)
            if not tokens:
                continue
            most = min(tokens_left, rows_left, cache.max_drafts) if strategy.needs_every_row else tokens_left
            tokens = tokens[: max(0, most)]
            tokens = tokens[: fit_drafts(sequence, len(tokens), cache, len(spans), self._recompute_length)]
            span.drafts, span.num_forced = tokens, len(tokens)
            span.num_certain = 0 if strategy.needs_every_row else len(tokens)
            tokens_left -= len(tokens)
            rows_left -= len(tokens) - span.num_certain
