"""The drafter of an engine: proposes tokens before each step and learns from the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pace.llm.engine.drafter import DraftMemory, fit_drafts, most_drafts
from pace.llm.sequence import Sequence, Span
from pace.llm.speculation.draft_length import Acceptance, DraftLengths
from pace.llm.speculation.source import DraftSource

FIRST_RATE = 0.6
"""Initial acceptance of a kind of draft: about that of a fair draft model, so that drafts are tried."""


class SpeculativeDrafter:
    """`Drafter` that takes drafts from a source. Their number is chosen for the most tokens per second.

    Sequences get drafts if they decode and their strategy takes drafts. A step that also computes prompts or forced
    tokens has none: the processor is then busy, and each row costs its full price. Proposals and their timing affect
    only the speed: the sampler picks every token as it would without drafts.
    """

    def __init__(
        self,
        source: DraftSource,
        lengths: DraftLengths,
        most: int,
        recompute_length: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`most` is the maximum number of drafts of a sequence. `recompute_length` is the target model's. `clock`
        returns seconds."""
        self.source = source
        self.lengths = lengths
        self._most = most
        self._recompute_length = recompute_length
        self._clock = clock
        self._rates: dict[Sequence, dict[int, Acceptance]] = {}
        self._rates_of_kind: dict[int, Acceptance] = {}
        self._kinds: dict[Sequence, int] = {}  # of the drafts of this step
        self._num_proposed: dict[Sequence, int] = {}  # in this step; a mask may have dropped some of them since
        self._is_decode = False
        self._spent = 0.0  # seconds of proposing, in this step
        self._ended: float | None = None  # end of the last step outside a rest; None if unknown
        self._resting = self._rest = 0  # steps of the current rest, and steps of it still to come
        self._resting_spans = 0
        self._is_left_alone = False  # True in a step of a rest
        self._plain_share = 0.0  # seconds of each sequence in a step of a rest

    # -- before the step -----------------------------------------------------------------------------------------------

    def extend(self, spans: list[Span], cache: Any) -> None:
        self._num_proposed.clear()
        self._is_decode = all([span.num_tokens == 1 and not span.drafts for span in spans])
        if self._resting and self._goes_on_resting(len(spans)):
            return
        if self._is_decode:
            if self._ended is None:
                self._ended = self._clock()
            self._kinds.clear()
            self._spent = 0.0
            if self.lengths.wants_drafts():
                self._extend(spans, cache)

    def _goes_on_resting(self, num_spans: int) -> bool:
        """Returns True if this step belongs to the current rest. At the end of a rest, reports its total time unless
        the decoding sequences changed."""
        self._is_left_alone = False
        if not self._is_decode or num_spans != self._resting_spans:
            self._resting, self._ended = 0, None
        elif self._rest:
            self._rest -= 1
            self._is_left_alone = True
        else:
            now = self._clock()
            self.lengths.observe_rest(num_spans, self._resting, now - self._ended)
            self._resting, self._ended = 0, now
        return self._is_left_alone

    def _extend(self, spans: list[Span], cache: Any) -> None:
        candidates: list[Span] = []
        rates: list[float] = []
        for span in spans:
            kind = self._kind(span)
            if kind is not None:
                candidates.append(span)
                rates.append(self._rate(span.sequence, kind))
                self._kinds[span.sequence] = kind
        if not candidates:
            return
        sequences = [span.sequence for span in candidates]
        chosen = self.lengths.choose(rates, len(spans), lambda lengths: self.source.seconds(sequences, lengths))
        if not any(chosen):
            return
        chosen = [
            fit_drafts(sequence, min(length, cache.max_drafts), cache, len(spans), self._recompute_length)
            for sequence, length in zip(sequences, chosen)
        ]
        if any(chosen):
            for span, drafts in zip(candidates, self.source.propose(sequences, chosen, cache.kv)):
                span.drafts = drafts
                self._num_proposed[span.sequence] = len(drafts)
            self._spent = self.source.spent()

    def _kind(self, span: Span) -> int | None:
        """Returns the kind of draft that the span could have; None if it can have none."""
        sequence = span.sequence
        if not sequence.strategy.takes_drafts or span.start != len(sequence.tokens) - 1:
            return None
        if most_drafts(sequence, self._recompute_length) < 1:
            return None
        self._rates.setdefault(sequence, {})
        return self.source.kind(sequence, self._most)

    def _rate(self, sequence: Sequence, kind: int) -> float:
        of_kind = self._rates_of_kind.get(kind)
        prior = of_kind.rate(FIRST_RATE) if of_kind else FIRST_RATE
        own = self._rates[sequence].get(kind)
        return own.rate(prior) if own else prior

    # -- after the step ------------------------------------------------------------------------------------------------

    def learn(self, spans: list[Span], outcomes: list[list[int]], kept: Tensor | None = None) -> None:
        if kept is not None:
            self.source.observe(spans, outcomes, kept)
        if self._is_left_alone:
            return self._note_rest(spans)
        num_drafts = 0
        for span, tokens in zip(spans, outcomes):
            sequence = span.sequence
            num_proposed = self._num_proposed.get(sequence, 0)
            if num_proposed:
                num_drafts += len(span.drafts)
                self._learn_rate(sequence, num_proposed, max(0, len(tokens) - 1))
                self.source.settle(sequence, span.start + span.num_tokens + max(0, len(tokens) - 1))
            if sequence.is_finished:
                self.forget(sequence)
        if len(self._rates) > 2 * len(spans) + 16:
            self._forget_finished()
        now = self._clock()
        if self._is_decode:
            self._learn_cost(spans, num_drafts, outcomes, now - self._ended)
            self._begin_rest(len(spans))
        self._ended = self._clock() if self._resting else now

    def _note_rest(self, spans: list[Span]) -> None:
        """Notes a step of a rest, which is not measured: it counts as a plain step."""
        for span in spans:
            sequence = span.sequence
            sequence.stats.step_seconds += self._plain_share
            sequence.stats.plain_seconds += self._plain_share
            if sequence.is_finished:
                self.forget(sequence)

    def _begin_rest(self, num_spans: int) -> None:
        self._resting = self._rest = self.lengths.rest()
        if self._resting:
            self._resting_spans = num_spans
            self._plain_share = (self.lengths.plain_seconds(num_spans) or 0.0) / num_spans

    def _learn_rate(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        kind = self._kinds[sequence]
        rates = self._rates[sequence]
        if kind not in rates:
            rates[kind] = Acceptance(memory=10, strength=3)
        if kind not in self._rates_of_kind:
            self._rates_of_kind[kind] = Acceptance(memory=50, strength=2)
        rates[kind].add(num_proposed, num_accepted)
        self._rates_of_kind[kind].add(num_proposed, num_accepted)

    def _learn_cost(self, spans: list[Span], num_drafts: int, outcomes: list[list[int]], seconds: float) -> None:
        """Reports the time since the previous step, and adds to each sequence the time its tokens would have taken
        without drafts."""
        num_spans = len(spans)
        self.lengths.observe(num_spans, num_drafts, sum(map(len, outcomes)), self._spent, seconds - self._spent)
        plain_seconds = self.lengths.plain_seconds(num_spans) if num_drafts else seconds
        if plain_seconds is None:
            return
        for span, tokens in zip(spans, outcomes):
            times = span.sequence.stats
            times.step_seconds += seconds / num_spans
            times.plain_seconds += plain_seconds / num_spans * len(tokens)

    # -- state ---------------------------------------------------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        self._rates.pop(sequence, None)
        self.source.forget(sequence)

    def _forget_finished(self) -> None:
        """Drops the state of sequences that were aborted between steps."""
        for sequence in [sequence for sequence in self._rates if sequence.is_finished]:
            self.forget(sequence)

    def reset(self) -> None:
        self._resting, self._is_left_alone, self._ended = 0, False, None
        self._rates.clear()
        self.source.reset()

    def check_integrity(self) -> None:
        self._forget_finished()
        self.source.check_integrity()

    def bytes_for(self, num_tokens: int) -> int:
        return self.source.bytes_for(num_tokens)

    def memory(self) -> DraftMemory:
        return self.source.memory()
