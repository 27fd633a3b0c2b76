"""Who proposes tokens for the model to verify. Without a draft source it is `NoDraft`, a real object."""

from __future__ import annotations

from typing import Any, Protocol

from pace.llm.sequence import Span


class Drafter(Protocol):
    """Extends spans with proposed tokens before the step runs.

    A drafter may set `span.drafts` of spans that reach the end of their sequence's tokens and want one row of logits, after
    `cache.reserve(sequence, end)` said that there is room, and as long as `sequence.max_length` is not passed. The sampler
    keeps the proposals that agree with what it would have picked; the cache drops the rest.
    """

    def extend(self, spans: list[Span], cache: Any) -> None: ...


class NoDraft:
    """Proposes nothing: each decode step computes one token per sequence."""

    def extend(self, spans: list[Span], cache: Any) -> None:
        pass
