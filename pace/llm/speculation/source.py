"""Interface of draft sources, as the drafter uses them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pace.batch import LayerBlocks
from pace.llm.engine.drafter import DraftMemory
from pace.llm.sequence import Sequence, Span


class DraftSource(Protocol):
    """Proposes the next tokens of sequences. Keeps state for each sequence until `forget`; between two calls a sequence
    only grows. The drafter calls it on the engine's thread.

    Proposals affect the speed, never which tokens are generated."""

    def kind(self, sequence: Sequence, most: int) -> int | None:
        """Returns the kind of proposal available for the sequence now, of up to `most` tokens; None if there is none.
        Acceptance is measured for each kind."""
        ...

    def seconds(self, sequences: list[Sequence], lengths: list[int]) -> float:
        """Returns the expected seconds of `propose`, from measurements so far."""
        ...

    def propose(
        self, sequences: list[Sequence], lengths: list[int], kv: list[LayerBlocks] | None = None
    ) -> list[list[int]]:
        """Returns up to `lengths[i]` tokens for each sequence. `kind` was called for these sequences just before. `kv`:
        the target's cache, which has all tokens of a sequence but the last. Only a source that sees it needs it."""
        ...

    def spent(self) -> float:
        """Returns the seconds that the last `propose` took, without interruptions."""
        ...

    def observe(self, spans: list[Span], outcomes: list[list[int]], kept: Tensor) -> None:
        """Called after each step of a model that keeps rows, before `settle`: `kept [T, W]` are those of all tokens of
        the step. They are overwritten by the next step. `outcomes`: as in `Drafter.learn`; the sequences have these
        tokens, up to one that stopped them."""
        ...

    def settle(self, sequence: Sequence, num_valid: int) -> None:
        """Called after the step: the first `num_valid` of the sequence's tokens and drafts are valid."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Frees the state of the sequence; harmless if there is none."""
        ...

    def reset(self) -> None:
        """Frees everything, in any state that a failed call left."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if memory is held for no sequence."""
        ...

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of this source's cache for a sequence of `num_tokens` tokens."""
        ...

    def memory(self) -> DraftMemory: ...
