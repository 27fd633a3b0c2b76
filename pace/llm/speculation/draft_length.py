"""How many drafts are worth a step: numbers in, a length for each sequence out. Nothing here looks at a clock or a token.

With `B` sequences that decode, and a fraction `a` of the drafts of a sequence that agree with the model, `k` drafts bring
`a + a^2 + ... + a^k` tokens more than the one that a plain step brings. They cost what proposing takes, and what a step of
`B + k` tokens takes more than one of `B`: both are measured. Lengths are chosen so that the most tokens come out of a second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

MAX_DRAFTS_PER_STEP = 128
"""Of all sequences together: each is a row of logits, 4 bytes for each token of the vocabulary."""


class Acceptance:
    """The fraction of drafts that were right, of the verified ones; those after the first wrong one were never looked at.

    Earlier steps count less and less (`memory` is how many steps count, about); where little was seen, what is given as
    `prior` counts like `strength` drafts.
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
    """Seconds of a step by how many tokens it computes: means of what was measured lately, straight lines between them."""

    FORGET_AFTER = 2000
    """Measurements after which a number of tokens that did not come again is dropped: the text has grown, the machine is busy."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}
        self._times_seen: dict[int, int] = {}
        self._last_seen: dict[int, int] = {}
        self._count = 0

    def add(self, num_tokens: int, seconds: float) -> float:
        """Takes a measurement, and returns it, twice the mean at most: more is an interruption, of which the step knows nothing.

        The first steps of a size allocate: of three the fastest counts. Then the mean is that of about ten."""
        size = self._size(num_tokens)
        self._count += 1
        self._last_seen[size] = self._count
        known = self._seconds.get(size)
        if known is None:
            self._sizes.insert(bisect_left(self._sizes, size), size)
            self._seconds[size], self._times_seen[size] = seconds, 1
        elif self._times_seen[size] < 3:
            self._times_seen[size] += 1
            self._seconds[size] = min(known, seconds)
        else:
            self._seconds[size] = known + 0.1 * (min(seconds, 2 * known) - known)
        if self._count % self.FORGET_AFTER == 0:
            self._forget()
        return min(seconds, 2 * self._seconds[size])

    def at(self, num_tokens: int) -> float | None:
        """Seconds, None where nothing was measured. Beyond the measured sizes the line through the outermost two goes on, if it rises."""
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return None
        exact = seconds.get(self._size(num_tokens))
        if exact is not None:
            return exact
        if len(sizes) == 1:
            return seconds[sizes[0]]
        right = min(max(bisect_left(sizes, num_tokens), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (seconds[high] - seconds[low]) / (high - low)
        if not low <= num_tokens <= high:
            slope = max(slope, 0.0)
            if num_tokens > high:
                return seconds[high] + slope * (num_tokens - high)
            return max(seconds[low] - slope * (low - num_tokens), 0.5 * seconds[low])
        return seconds[low] + slope * (num_tokens - low)

    @staticmethod
    def _size(num_tokens: int) -> int:
        """Sizes that count as one: each up to 32, then every eighth."""
        return num_tokens if num_tokens <= 32 else (num_tokens + 4) // 8 * 8

    def _forget(self) -> None:
        oldest = self._count - self.FORGET_AFTER
        for size in [size for size in self._sizes if self._last_seen[size] <= oldest]:
            self._sizes.remove(size)
            del self._seconds[size], self._times_seen[size], self._last_seen[size]


class DraftLengths(Protocol):
    """Who decides how many drafts each sequence gets."""

    def rests(self) -> bool:
        """To be asked once before each step; where it is True, the step needs neither drafts nor to be observed."""
        ...

    def wants_drafts(self) -> bool:
        """Where it is False, nothing needs to be proposed for a step of nothing but decoding."""
        ...

    def choose(self, rates: list[float], num_sequences: int, draft_seconds: Callable[[list[int]], float]) -> list[int]:
        """A length for each sequence that could have drafts, of which a fraction `rates[i]` is likely to be accepted, in a step
        of `num_sequences` that decode. `draft_seconds(lengths)` is what proposing so many costs."""
        ...

    def observe(self, num_sequences: int, num_drafts: int, num_tokens: int, draft_seconds: float, step_seconds: float) -> None:
        """What came of a step of nothing but decoding: `num_tokens` in all; `draft_seconds` went into proposing."""
        ...

    def plain_seconds(self, num_sequences: int) -> float | None:
        """What a step without drafts takes; None where none was measured."""
        ...


class FixedLength:
    """Always as many as were asked for."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._plain = StepCosts()

    def rests(self) -> bool:
        return False

    def wants_drafts(self) -> bool:
        return True

    def choose(self, rates: list[float], num_sequences: int, draft_seconds: Callable[[list[int]], float]) -> list[int]:
        return [min(self.num_draft_tokens, MAX_DRAFTS_PER_STEP // len(rates))] * len(rates)

    def observe(self, num_sequences: int, num_drafts: int, num_tokens: int, draft_seconds: float, step_seconds: float) -> None:
        if not num_drafts:
            self._plain.add(num_sequences, step_seconds)

    def plain_seconds(self, num_sequences: int) -> float | None:
        return self._plain.at(num_sequences)


LEVELS = 32
"""Acceptance is told in 32nds: finer than it is known."""
THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.42, 0.35, 0.28, 0.22, 0.16, 0.1, 0.05)
"""A draft is proposed where it is accepted with at least this probability. One threshold for all sequences of a step gives the
best lengths, as each draft row costs about the same wherever it stands; which one is best is found by trying all."""


def _depth(rate: float, threshold: float, most: int) -> int:
    """The largest k of at most `most` with rate^k >= threshold."""
    depth, probability = 0, rate
    while depth < most and probability >= threshold:
        depth += 1
        probability *= rate
    return depth


class AdaptiveLength:
    """As many as pay, by measured acceptance and measured cost; none where none do.

    Losses are bounded whatever the estimates say: what a drafted step took longer than plain steps for the same tokens is taken
    off a credit, what it was faster is added, and below zero nothing is drafted. Plain steps add `ALLOWANCE` of their own
    time, which pays for looking now and then whether drafts help by now.
    """

    ALLOWANCE = 0.01
    """Of the time of plain steps that may go into drafts that do not help."""
    MOST_CREDIT = 12.0
    """In plain steps: how much of what was won may be lost again before it is enough; and the most that is owed."""
    FIRST_CREDIT = 8.0
    """In plain steps: what the first drafts may cost, of which neither cost nor acceptance are known."""
    PROBE_EVERY, MOST_BETWEEN_PROBES = 32, 512
    """Plain steps after which drafts are tried where none seem to pay: twice as many after each try, until drafts pay again."""
    PLAIN_EVERY = 64
    """Drafted steps after which one goes without: what a plain step costs changes as the text grows."""
    KEEP_FOR = 8
    """Decisions in which a threshold is not computed anew."""
    MOST_REST = 16
    """Steps in a row that are left alone, after drafts did not pay: asking and measuring takes tens of us, a step of the bundled model 160."""
    LEAST_GAIN = 1.1
    """Tokens a second with drafts over those without from which drafts are worth it: a step of another size than the one before costs
    a little around it that is not measured."""
    FIRST_LENGTH = 4
    """Until it is known what a drafted step costs."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.costs = StepCosts()
        self.credit: float | None = None
        """Seconds; None until a plain step was measured."""
        self._depths = [[_depth(level / LEVELS, threshold, num_draft_tokens) for threshold in THRESHOLDS] for level in range(LEVELS + 1)]
        self._gains = [[sum((level / LEVELS) ** i for i in range(1, depth + 1)) for depth in row] for level, row in enumerate(self._depths)]
        self._kept: dict[tuple[int, int], tuple[int | None, int]] = {}  # (sequences, best level) -> threshold's index, good until decision
        self._num_decisions = 0
        self._num_plain = self._num_drafted = 0  # steps since the last one of the other kind
        self._rest = self._rest_length = 0
        self._probe_after = self.PROBE_EVERY
        self._was_drafted = False

    def rests(self) -> bool:
        if not self._rest:
            return False
        self._rest -= 1
        self._num_plain += 1
        return True

    def wants_drafts(self) -> bool:
        return self.credit is not None and self.credit > 0 and self._num_drafted < self.PLAIN_EVERY

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
        self._rest_length = min(2 * self._rest_length + 1, self.MOST_REST)
        self._rest = self._rest_length
        return none

    def observe(self, num_sequences: int, num_drafts: int, num_tokens: int, draft_seconds: float, step_seconds: float) -> None:
        step_seconds = self.costs.add(num_sequences + num_drafts, step_seconds)
        plain = self.plain_seconds(num_sequences)
        credit = self.FIRST_CREDIT * plain if self.credit is None else self.credit
        if num_drafts:
            self._num_plain, self._num_drafted, self._was_drafted = 0, self._num_drafted + 1, True
            credit += plain * num_tokens / num_sequences - draft_seconds - step_seconds
        else:
            self._num_plain, self._num_drafted = self._num_plain + 1, 0
            credit += self.ALLOWANCE * (1 + self._rest_length) * step_seconds - draft_seconds
        most = self.MOST_CREDIT * plain
        self.credit = max(min(credit, most), -most)

    def plain_seconds(self, num_sequences: int) -> float | None:
        return self.costs.at(num_sequences)

    def _threshold(self, levels: list[int], num_sequences: int, most: int, draft_seconds: Callable[[list[int]], float]) -> int | None:
        """Index of the threshold with the most tokens a second, None where plain steps have more."""
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
        """Expected tokens accepted."""
        if length == self._depths[level][index]:
            return self._gains[level][index]
        rate = level / LEVELS
        return sum(rate**i for i in range(1, length + 1))

    def _loss(self, lengths: list[int], num_sequences: int, draft_seconds: Callable[[list[int]], float]) -> float:
        """Seconds lost where no draft is accepted."""
        return self.costs.at(num_sequences + sum(lengths)) - self.costs.at(num_sequences) + draft_seconds(lengths)
