"""What draft sources with a model of their own have in common: costs of its passes, and the choice of a draft."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pace.llm.sequence import Sequence
from pace.llm.speculation.draft_length import StepCosts
from pace.ops.protocol import Ops


class DraftWriter:
    """Base of `DraftSource`s whose model writes drafts token by token, one token of every sequence at a time.

    Drafts are picked as the sequence's own strategy would pick from these logits. Sampling uses the random number of
    the token to be predicted, so that likely tokens match."""

    def __init__(
        self,
        model: Any,
        ops: Ops,
        vocab_size: int,
        weights: dict[str, int],
        weight_counts: dict[str, int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`model` is a runner, as for an engine; `vocab_size` that of the target model. `weights` are its bytes by part
        and `weight_counts` their number, for reports. `clock` returns seconds."""
        self.model = model
        self.ops = ops
        self.costs = StepCosts()
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._weights, self._weight_counts = weights, weight_counts
        self._clock = clock
        self._spent = 0.0

    def seconds(self, sequences: list[Sequence], lengths: list[int]) -> float:
        """Returns the measured cost of the forward passes."""
        return sum(self.costs.at(num_tokens) or 0.0 for num_tokens in self._passes(lengths))

    def spent(self) -> float:
        return self._spent

    def _passes(self, lengths: list[int]) -> list[int]:
        """Returns the number of tokens of each forward pass."""
        return [sum(length > depth for length in lengths) for depth in range(max(lengths))]

    def _pick(self, sequence: Sequence, logits: Tensor, largest: int, depth: int) -> int | None:
        """Returns the token that the sequence's strategy would pick from these logits; None if they are not finite."""
        if largest < 0:
            return None
        if sequence.strategy.rules is None:
            return largest
        return sequence.strategy.guess(self.ops, logits, sequence.num_generated + depth)

    def _of_target(self, logits: Tensor) -> Tensor:
        """Returns logits of the target's vocabulary `[R, V]`."""
        return logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size].contiguous()
