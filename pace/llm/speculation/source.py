"""Where drafts come from, as the drafter sees it."""

from __future__ import annotations

from typing import Protocol

from pace.llm.engine.drafter import DraftMemory
from pace.llm.sequence import Sequence


class DraftSource(Protocol):
    """Proposes what may come next. Keeps what it needs for each sequence until `forget`; between two calls a sequence
    only grows. The drafter calls it under the engine's lock.

    What it proposes decides how fast tokens come, never which ones."""

    def kind(self, sequence: Sequence, most: int) -> int | None:
        """What sort of proposal there is for the sequence now, of up to `most` tokens; None where there is none.
        Acceptance is measured for each kind."""
        ...

    def seconds(self, sequences: list[Sequence], lengths: list[int]) -> float:
        """What `propose` is likely to take, as far as it was measured."""
        ...

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """At most so many tokens for each sequence, which is what `kind` was asked of last."""
        ...

    def spent(self) -> float:
        """Seconds that the last `propose` took, without interruptions."""
        ...

    def settle(self, sequence: Sequence, num_valid: int) -> None:
        """After the step: of the sequence's tokens with its drafts the first `num_valid` have come true."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Frees what is kept for the sequence; harmless where nothing is."""
        ...

    def reset(self) -> None:
        """Frees everything, in whatever state a failed call left it."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError where memory is held for no sequence."""
        ...

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of cache that a sequence of so many tokens takes here."""
        ...

    def memory(self) -> DraftMemory: ...
