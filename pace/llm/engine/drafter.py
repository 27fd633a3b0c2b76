"""Interface of drafters, which propose tokens for the model to verify. Without a draft source the engine has a
`NoDraft`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from pace.batch import BLOCK_SIZE
from pace.llm.sequence import Sequence, Span


def most_drafts(sequence: Sequence, recompute_length: int | None) -> int:
    """Maximum number of drafts before the sequence reaches `max_length`, less the one token that each step adds anyway.
    Excludes drafts beyond the length at which the model recomputes the sequence with other angles: their rows would
    have the old angles."""
    length = len(sequence.tokens)
    limit = sequence.max_length - length - 1
    if recompute_length and sequence.rope_length < recompute_length:
        limit = min(limit, recompute_length - 1 - length)
    return limit


def fit_drafts(sequence: Sequence, count: int, cache: Any, num_spans: int, recompute_length: int | None) -> int:
    """Returns `count`, reduced to what the sequence's length allows, and reserves room in the cache for it. Returns 0
    if that would take blocks that other spans need for their next token."""
    count = min(count, most_drafts(sequence, recompute_length))
    end = len(sequence.tokens) + count
    takes_blocks = end > len(sequence.block_table) * BLOCK_SIZE
    if count <= 0 or (takes_blocks and cache.num_free_blocks <= num_spans * cache.num_groups):
        return 0
    return count if cache.reserve(sequence, end) else 0


@dataclass(frozen=True)
class DraftMemory:
    """Memory for drafting, in addition to the model's, as in `MemoryReport`."""

    weights: dict[str, int] = field(default_factory=dict)
    weight_counts: dict[str, int] = field(default_factory=dict)
    cache_used: int = 0
    cache_touched: int = 0
    cache_budget: int = 0


class Drafter(Protocol):
    """Extends spans with proposed tokens before the step runs, and learns from the outcome.

    A drafter may set `span.drafts` of spans that reach the end of their sequence's tokens and want one row of logits.
    It must first get True from `cache.reserve(sequence, end)`, and `end` must not exceed `sequence.max_length`. The
    sampler keeps the proposals that match the tokens it picks; the cache drops the rest.
    """

    def extend(self, spans: list[Span], cache: Any) -> None: ...

    def learn(self, spans: list[Span], outcomes: list[list[int]], kept: Tensor | None = None) -> None:
        """Receives, after the step, the tokens that each span's logits gave: one more than its accepted drafts. `kept`
        are the rows of all tokens that the model keeps for a drafter, valid during the call."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drops the state of one sequence, whose tokens may change."""
        ...

    def reset(self) -> None:
        """Drops the state of every sequence. Works in any state that a failed step left."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if state of finished sequences is kept."""
        ...

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the drafter's own cache for `num_tokens` tokens."""
        ...

    def memory(self) -> DraftMemory: ...


class NoDraft:
    """Proposes nothing: each decode step computes one token per sequence."""

    def extend(self, spans: list[Span], cache: Any) -> None:
        pass

    def learn(self, spans: list[Span], outcomes: list[list[int]], kept: Tensor | None = None) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def reset(self) -> None:
        pass

    def check_integrity(self) -> None:
        pass

    def bytes_for(self, num_tokens: int) -> int:
        return 0

    def memory(self) -> DraftMemory:
        return DraftMemory()
