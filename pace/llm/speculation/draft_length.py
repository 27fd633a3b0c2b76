"""Chooses how many drafts each sequence gets. Works on numbers only: nothing here reads a clock or a token.

Let `B` sequences decode, and let `a` be the fraction of drafts that are accepted. Then `k` drafts for one sequence add
`a + a^2 + ... + a^k` tokens to those of a plain step. They cost the proposing, and the difference between a step of `B
+ k` tokens and one of `B`: both are measured. Lengths are chosen to maximise tokens per second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

MAX_DRAFTS_PER_STEP = 128
"""Limit for all sequences together. Each draft is a row of logits, 4 bytes for each token of the vocabulary."""


class Acceptance:
    """The fraction of verified drafts that were right. Drafts after the first wrong one are not verified.

    Earlier steps count less and less; about `memory` steps count. With few measurements, `prior` counts like `strength`
    drafts.
    """

    __slots__ = ("_keep", "_strength", "_accepted", "_verified")

    def __init__(self, memory: float, strength: float) -> None:
        self._keep = 1 - 1 / memory
        self._strength = strength
        self._accepted = self._verified = 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self._accepted = self._accepted * self._keep + num_accepted
        self._verified = self._verified * self._keep + min(num_drafted, num_accepted + 1)

    def rate(self, prior: float) -> float:
        return (self._accepted + self._strength * prior) / (self._verified + self._strength)


class StepCosts:
    """Seconds of a step by its number of tokens: means of recent measurements, linearly interpolated."""

    FORGET_AFTER = 2000
    """Measurements after which a size that did not occur again is dropped, because sequences have grown or the machine
    is busy."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        self._sizes: list[int] = []  # the measured sizes, in order
        self._count = 0

    def add(self, num_tokens: int, seconds: float, num_steps: int = 1) -> float:
        """Adds a measurement, the mean of `num_steps` in a row. Returns it, limited to twice the mean: more is an
        interruption that has nothing to do with the step.

        The first steps of a size allocate, so the fastest of the first three measurements counts. After that the mean
        covers about ten steps."""
        size = self._size(num_tokens)
        self._count += 1
        known = self._measured.get(size)
        if known is None:
            known = self._measured[size] = _Measured(seconds)
            self._sizes = sorted(self._measured)
        elif known.times < 3:
            known.seconds = min(known.seconds, seconds)
        else:
            known.seconds += (1 - 0.9**num_steps) * (min(seconds, 2 * known.seconds) - known.seconds)
        known.times += 1
        known.last = self._count
        if self._count % self.FORGET_AFTER == 0:
            self._forget()
        return min(seconds, 2 * known.seconds)

    def at(self, num_tokens: int) -> float | None:
        """Returns the seconds of a step, or None without any measurement. Beyond the measured sizes, extends the line
        through the outermost two if it rises."""
        exact = self._measured.get(self._size(num_tokens))
        if exact is not None:
            return exact.seconds
        sizes = self._sizes
        if not sizes:
            return None
        if len(sizes) == 1:
            return self._measured[sizes[0]].seconds
        right = min(max(bisect_left(sizes, num_tokens), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        low_seconds, high_seconds = self._measured[low].seconds, self._measured[high].seconds
        slope = (high_seconds - low_seconds) / (high - low)
        if low <= num_tokens <= high:
            return low_seconds + slope * (num_tokens - low)
        slope = max(slope, 0.0)
        if num_tokens > high:
            return high_seconds + slope * (num_tokens - high)
        return max(low_seconds - slope * (low - num_tokens), 0.5 * low_seconds)

    @staticmethod
    def _size(num_tokens: int) -> int:
        """Returns the size class: each size up to 32 by itself, then multiples of eight."""
        return num_tokens if num_tokens <= 32 else (num_tokens + 4) // 8 * 8

    def _forget(self) -> None:
        oldest = self._count - self.FORGET_AFTER
        self._measured = {size: measured for size, measured in self._measured.items() if measured.last > oldest}
        self._sizes = sorted(self._measured)


@dataclass
class _Measured:
    """An entry of `StepCosts`. It is inserted only when complete, because an interrupt may come after any line."""

    seconds: float
    times: int = 0
    last: int = 0


class DraftLengths(Protocol):
    """Policy that chooses the number of drafts of each sequence.

    Before a step that only decodes, `wants_drafts` is called, then `choose` if something can be proposed. `observe`
    reports the step. `rest` returns the number of following steps to skip, and `observe_rest` reports those
    together."""

    def wants_drafts(self) -> bool:
        """Returns False if this step needs no proposals."""
        ...

    def choose(self, rates: list[float], num_sequences: int, draft_seconds: Callable[[list[int]], float]) -> list[int]:
        """Returns a length for each sequence that could have drafts. `rates[i]` is the expected fraction of its drafts
        that are accepted. `num_sequences` is the number of decoding sequences in the step. `draft_seconds(lengths)` is
        the cost of proposing."""
        ...

    def observe(
        self, num_sequences: int, num_drafts: int, num_tokens: int, draft_seconds: float, step_seconds: float
    ) -> None:
        """Records a step that gave `num_tokens`. `draft_seconds` is the time of proposing. `step_seconds` is the rest
        of the time since the end of the step before it, including the time of this policy."""
        ...

    def rest(self) -> int:
        """Returns the number of following steps that need neither drafts nor individual observation."""
        ...

    def observe_rest(self, num_sequences: int, num_steps: int, seconds: float) -> None:
        """Records the total seconds of the skipped steps."""
        ...

    def plain_seconds(self, num_sequences: int) -> float | None:
        """Returns the seconds of a step without drafts; None if none was measured."""
        ...


class FixedLength:
    """Always proposes `num_draft_tokens`, within the limit for the step."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._plain = StepCosts()

    def wants_drafts(self) -> bool:
        return True

    def choose(self, rates: list[float], num_sequences: int, draft_seconds: Callable[[list[int]], float]) -> list[int]:
        return [min(self.num_draft_tokens, MAX_DRAFTS_PER_STEP // len(rates))] * len(rates)

    def observe(
        self, num_sequences: int, num_drafts: int, num_tokens: int, draft_seconds: float, step_seconds: float
    ) -> None:
        if not num_drafts:
            self._plain.add(num_sequences, step_seconds)

    def rest(self) -> int:
        return 0

    def observe_rest(self, num_sequences: int, num_steps: int, seconds: float) -> None:
        raise AssertionError("it never rests")

    def plain_seconds(self, num_sequences: int) -> float | None:
        return self._plain.at(num_sequences)


LEVELS = 32
"""Acceptance is rounded to 32nds; the measurements are less precise than that."""
THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.42, 0.35, 0.28, 0.22, 0.16, 0.1, 0.05)
"""A draft is proposed if it is accepted with at least this probability. A common threshold for all sequences of a step
gives the best lengths, since each draft row costs about the same. The best threshold is found by trying all."""


def _depth(rate: float, threshold: float, most: int) -> int:
    """Returns the largest k of at most `most` with rate^k >= threshold."""
    depth, probability = 0, rate
    while depth < most and probability >= threshold:
        depth += 1
        probability *= rate
    return depth


class AdaptiveLength:
    """Chooses the lengths with the most tokens per second, from measured acceptance and cost; 0 if drafts do not pay.

    Plain steps are measured while nothing is proposed. A credit bounds the losses even if the estimates are wrong. A
    step that takes longer than plain steps for the same tokens reduces it by the excess; a gain increases it. Below
    zero nothing is drafted. Skipped steps add `ALLOWANCE` of their time, which pays for the next try.
    """

    ALLOWANCE = 0.005
    """Fraction of the time of plain steps that may be spent on useless drafts."""
    MOST_CREDIT = 12.0
    """Bound of the credit in both directions, in plain steps."""
    FIRST_CREDIT = 8.0
    """Initial credit, in plain steps, for the first drafts, whose cost and acceptance are unknown."""
    PROBE_EVERY, MOST_BETWEEN_PROBES = 32, 512
    """Plain steps after which drafts are tried, although none seem to pay, and the maximum of that number. It doubles
    after each try, until drafts pay again."""
    PLAIN_EVERY, PLAIN_RUN = 64, 4
    """After PLAIN_EVERY drafted steps, PLAIN_RUN steps are plain, to measure them: their cost changes as sequences
    grow."""
    KEEP_FOR = 8
    """Decisions for which a threshold is kept before it is recomputed."""
    MOST_REST = 32
    """Maximum number of steps in a row that are skipped after drafts did not pay. A decision takes tens of us, a step
    of the bundled model 160 us."""
    LEAST_GAIN = 1.1
    """Minimum ratio of tokens per second with and without drafts: estimates are not exact."""
    FIRST_LENGTH = 4
    """Maximum length until the cost of a drafted step was measured."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.costs = StepCosts()
        self.credit: float | None = None
        """Seconds; None until a plain step was measured."""
        self._depths = [
            [_depth(level / LEVELS, threshold, num_draft_tokens) for threshold in THRESHOLDS]
            for level in range(LEVELS + 1)
        ]
        self._gains = [
            [sum((level / LEVELS) ** i for i in range(1, depth + 1)) for depth in row]
            for level, row in enumerate(self._depths)
        ]
        self._kept: dict[
            tuple[int, int], tuple[int | None, int]
        ] = {}  # (sequences, best level) -> (threshold's index, decision at which it expires)
        self._num_decisions = 0
        self._num_plain = self._num_drafted = 0  # steps since the last drafted one; drafted steps since a plain run
        self._rest_length = 0
        self._declined = False
        """True if this policy chose to have no drafts in this step, rather than having nothing to propose."""
        self._probe_after = self.PROBE_EVERY
        self._was_drafted = False

    def wants_drafts(self) -> bool:
        self._declined = self.credit is None or self.credit <= 0
        return not self._declined

    def choose(self, rates: list[float], num_sequences: int, draft_seconds: Callable[[list[int]], float]) -> list[int]:
        none = [0] * len(rates)
        levels = [min(int(rate * LEVELS), LEVELS - 1) for rate in rates]
        most = MAX_DRAFTS_PER_STEP // len(rates)
        if not self._was_drafted:
            most = min(most, self.FIRST_LENGTH)
        threshold = self._threshold(levels, num_sequences, most, draft_seconds)
        if threshold is not None:
            self._rest_length, self._probe_after = 0, self.PROBE_EVERY
            return [min(self._depths[level][threshold], most) for level in levels]
        if self._num_plain >= self._probe_after and most:
            probe = none[:]
            probe[max(range(len(rates)), key=rates.__getitem__)] = min(2, most, self.num_draft_tokens)
            if self._loss(probe, num_sequences, draft_seconds) <= self.credit:
                self._probe_after = min(2 * self._probe_after, self.MOST_BETWEEN_PROBES)
                return probe
        self._declined = True
        return none

    def observe(
        self, num_sequences: int, num_drafts: int, num_tokens: int, draft_seconds: float, step_seconds: float
    ) -> None:
        if num_drafts:
            step_seconds = self.costs.add(num_sequences + num_drafts, step_seconds)
            self._num_plain, self._num_drafted, self._was_drafted = 0, self._num_drafted + 1, True
        else:
            self._num_plain += 1
            if self.credit is None:
                self.observe_rest(num_sequences, 1, step_seconds)
        plain = self.plain_seconds(num_sequences)
        self._earn(
            plain * num_tokens / num_sequences - draft_seconds - min(step_seconds, 2 * plain * num_tokens), plain
        )

    def rest(self) -> int:
        if self._declined:
            self._rest_length = min(2 * self._rest_length + 1, self.MOST_REST)
            return self._rest_length
        if self._num_drafted >= self.PLAIN_EVERY:
            self._num_drafted = 0
            return self.PLAIN_RUN
        return 0

    def observe_rest(self, num_sequences: int, num_steps: int, seconds: float) -> None:
        self._num_plain += num_steps
        self.costs.add(num_sequences, seconds / num_steps, num_steps)
        plain = self.plain_seconds(num_sequences)
        if self.credit is None:
            self.credit = self.FIRST_CREDIT * plain
        self._earn(self.ALLOWANCE * num_steps * plain, plain)

    def _earn(self, seconds: float, plain: float) -> None:
        most = self.MOST_CREDIT * plain
        self.credit = max(min(self.credit + seconds, most), -most)

    def plain_seconds(self, num_sequences: int) -> float | None:
        return self.costs.at(num_sequences)

    def _threshold(
        self, levels: list[int], num_sequences: int, most: int, draft_seconds: Callable[[list[int]], float]
    ) -> int | None:
        """Returns the index of the threshold with the most tokens per second; None if plain steps have more."""
        key = (num_sequences, max(levels))
        self._num_decisions += 1
        kept, good_until = self._kept.get(key, (None, 0))
        if self._num_decisions < good_until:
            return kept
        plain = self.costs.at(num_sequences)
        best, best_rate, last = None, self.LEAST_GAIN * num_sequences / plain, None
        for index in range(len(THRESHOLDS)):
            lengths = [min(self._depths[level][index], most) for level in levels]
            if lengths == last or not any(lengths):
                continue
            last = lengths
            gain = sum(self._gain(level, index, length) for level, length in zip(levels, lengths))
            rate = (num_sequences + gain) / (self.costs.at(num_sequences + sum(lengths)) + draft_seconds(lengths))
            if rate > best_rate:
                best, best_rate = index, rate
        self._kept[key] = best, self._num_decisions + self.KEEP_FOR
        return best

    def _gain(self, level: int, index: int, length: int) -> float:
        """Returns the expected number of accepted tokens."""
        if length == self._depths[level][index]:
            return self._gains[level][index]
        rate = level / LEVELS
        return sum(rate**i for i in range(1, length + 1))

    def _loss(self, lengths: list[int], num_sequences: int, draft_seconds: Callable[[list[int]], float]) -> float:
        """Returns the seconds lost if no draft is accepted."""
        return self.costs.at(num_sequences + sum(lengths)) - self.costs.at(num_sequences) + draft_seconds(lengths)
