"""Who proposes tokens for the model to verify. Without a draft source it is `NoDraft`, a real object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from pace.batch import BLOCK_SIZE
from pace.llm.sequence import Sequence, Span


def most_drafts(sequence: Sequence, recompute_length: int | None) -> int:
    """Drafts after which the sequence would be as long as it may get, less the token that each step brings by itself.
    And none beyond where the model would compute the sequence again with other angles: those rows would have the old
    ones."""
    length = len(sequence.tokens)
    limit = sequence.max_length - length - 1
    if recompute_length and sequence.rope_length < recompute_length:
        limit = min(limit, recompute_length - 1 - length)
    return limit


def fit_drafts(sequence: Sequence, count: int, cache: Any, num_spans: int, recompute_length: int | None) -> int:
    """`count`, less where the sequence may not get so long, with room in the cache; 0 where that would take blocks that
    others need for their next token."""
    count = min(count, most_drafts(sequence, recompute_length))
    end = len(sequence.tokens) + count
    takes_blocks = end > len(sequence.block_table) * BLOCK_SIZE
    if count <= 0 or (takes_blocks and cache.num_free_blocks <= num_spans * cache.num_groups):
        return 0
    return count if cache.reserve(sequence, end) else 0


@dataclass(frozen=True)
class DraftMemory:
    """What drafting takes beside the model, as in `MemoryReport`."""

    weights: dict[str, int] = field(default_factory=dict)
    weight_counts: dict[str, int] = field(default_factory=dict)
    cache_used: int = 0
    cache_touched: int = 0
    cache_budget: int = 0


class Drafter(Protocol):
    """Extends spans with proposed tokens before the step runs, and hears of what came of them.

    A drafter may set `span.drafts` of spans that reach the end of their sequence's tokens and want one row of logits,
    after `cache.reserve(sequence, end)` said that there is room, and as long as `sequence.max_length` is not passed.
    The sampler keeps the proposals that agree with what it would have picked; the cache drops the rest.
    """

    def extend(self, spans: list[Span], cache: Any) -> None: ...

    def learn(self, spans: list[Span], outcomes: list[list[int]]) -> None:
        """After the step: the tokens that each span's logits gave, one more than the drafts that were accepted."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Forgets what it keeps of one sequence, whose tokens may be others from now on."""
        ...

    def reset(self) -> None:
        """Forgets what it keeps of every sequence, in whatever state a failed step left it."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError where something is kept of sequences that are done."""
        ...

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of cache of its own that a sequence of so many tokens takes."""
        ...

    def memory(self) -> DraftMemory: ...


class NoDraft:
    """Proposes nothing: each decode step computes one token per sequence."""

    def extend(self, spans: list[Span], cache: Any) -> None:
        pass

    def learn(self, spans: list[Span], outcomes: list[list[int]]) -> None:
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
