"""The number of drafts per step, on simulated machines and texts."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from pace.llm.speculation.draft_length import MAX_DRAFTS_PER_STEP, Acceptance, AdaptiveLength, FixedLength, StepCosts


def free(lengths: list[int]) -> float:
    return 0.0


@dataclass
class Machine:
    """Simulates decoding with drafts that are right with probability `rate`, and counts tokens and seconds. A step
    takes `base + slope * tokens` seconds, and `asking` more unless drafting rests."""

    lengths: FixedLength | AdaptiveLength
    rate: float
    base: float = 1.0
    slope: float = 0.05
    draft: float = 0.0
    noise: float = 0.0
    num_sequences: int = 1
    asking: float = 0.0

    def __post_init__(self) -> None:
        self.chance = random.Random(1)
        self.seconds = self.num_tokens = 0.0
        self.chosen: list[int] = []
        self.own = [Acceptance(memory=10, strength=3) for _ in range(self.num_sequences)]
        self.resting, self.rest_seconds = 0, []

    def run(self, num_steps: int) -> float:
        """Runs steps and returns their tokens per second, relative to steps without drafts."""
        seconds, num_tokens = self.seconds, self.num_tokens
        for _ in range(num_steps):
            self.step()
        plain = self.num_sequences / (self.base + self.slope * self.num_sequences)
        return (self.num_tokens - num_tokens) / (self.seconds - seconds) / plain

    def step(self) -> None:
        count = self.num_sequences
        if self.resting:
            seconds = self.take_seconds(count)
            self.rest_seconds.append(seconds)
            self.add(count, seconds, [0] * count)
            if len(self.rest_seconds) == self.resting:
                self.lengths.observe_rest(count, self.resting, sum(self.rest_seconds))
                self.resting = 0
            return
        chosen = [0] * count
        if self.lengths.wants_drafts():
            rates = [own.rate(0.6) for own in self.own]
            chosen = self.lengths.choose(rates, count, lambda lengths: self.draft * max(lengths))
        produced = 0
        for own, length in zip(self.own, chosen):
            accepted = 0
            while accepted < length and self.chance.random() < self.rate:
                accepted += 1
            if length:
                own.add(length, accepted)
            produced += accepted + 1
        step_seconds = self.take_seconds(count + sum(chosen)) + self.asking
        draft_seconds = self.draft * max(chosen)
        self.lengths.observe(count, sum(chosen), produced, draft_seconds, step_seconds)
        self.resting, self.rest_seconds = self.lengths.rest(), []
        self.add(produced, step_seconds + draft_seconds, chosen)

    def take_seconds(self, num_tokens: int) -> float:
        return (self.base + self.slope * num_tokens) * (1 + self.noise * self.chance.random())

    def add(self, num_tokens: int, seconds: float, chosen: list[int]) -> None:
        self.chosen += chosen
        self.seconds += seconds
        self.num_tokens += num_tokens


@pytest.mark.parametrize("num_sequences", [1, 4, 20])
def test_never_much_slower_than_plain(num_sequences: int) -> None:
    rates, drafts, slopes, noises = (0.0, 0.2, 0.5), (0.0, 0.1, 1.0), (0.001, 0.05, 0.3, 1.0, 10.0), (0.0, 0.3)
    for rate, draft, slope, noise in itertools.product(rates, drafts, slopes, noises):
        machine = Machine(AdaptiveLength(8), rate, slope=slope, draft=draft, num_sequences=num_sequences, noise=noise)
        machine.run(300)
        speed = machine.run(2000) * (1 + noise / 2)
        assert speed > 0.96, f"{speed:.3f} of plain steps with {rate=}, {draft=}, {slope=}, {noise=}"


def test_asking_is_paid_for_out_of_the_same_allowance() -> None:
    def tries(asking: float) -> int:
        machine = Machine(AdaptiveLength(8), 0.0, slope=1.0, asking=asking)
        machine.run(300)
        machine.chosen.clear()
        assert machine.run(6000) > 0.985
        return sum(length > 0 for length in machine.chosen)

    assert tries(asking=0.8) < tries(asking=0.0) / 2


def test_drafts_that_win_less_than_asking_costs_are_given_up() -> None:
    machine = Machine(AdaptiveLength(8), 0.5, slope=0.2, asking=0.6)
    machine.run(300)
    machine.chosen.clear()
    assert machine.run(4000) > 0.96 and sum(length > 0 for length in machine.chosen) < 400


@pytest.mark.parametrize("num_sequences", [1, 3, 16])
@pytest.mark.parametrize(
    "rate, slope, draft", [(0.9, 0.05, 0.0), (0.9, 0.05, 0.1), (0.7, 0.02, 0.05), (0.98, 0.1, 0.0), (0.5, 0.01, 0.0)]
)
def test_nearly_as_fast_as_the_best_fixed_length(rate: float, slope: float, draft: float, num_sequences: int) -> None:
    def speed(length: int) -> float:
        """Returns the expected tokens per second with a fixed length, relative to steps without drafts."""
        seconds = 1.0 + slope * num_sequences * (1 + length) + draft * length
        return sum(rate**depth for depth in range(length + 1)) * (1.0 + slope * num_sequences) / seconds

    best = max(map(speed, range(1, 1 + min(8, MAX_DRAFTS_PER_STEP // num_sequences))))
    machine = Machine(AdaptiveLength(8), rate, slope=slope, draft=draft, num_sequences=num_sequences)
    machine.run(200)
    assert best > 1.2 or num_sequences > 1
    assert machine.run(3000) > 0.9 * max(best, 1.0)


def test_turns_off_when_the_text_changes_and_on_again() -> None:
    machine = Machine(AdaptiveLength(8), 0.95, slope=0.05, draft=0.05)
    assert machine.run(500) > 2
    machine.rate = 0.0
    assert machine.run(100) > 0.8, "what was won pays for finding out"
    machine.chosen.clear()
    assert machine.run(1000) > 0.96 and sum(machine.chosen) < 200
    machine.rate = 0.95
    machine.run(500)
    assert machine.run(500) > 2


def test_tries_are_fewer_the_longer_none_of_them_helps() -> None:
    machine = Machine(AdaptiveLength(8), 0.0, slope=0.05)
    machine.run(1000)
    machine.chosen.clear()
    machine.run(4096)
    tries = sum(length > 0 for length in machine.chosen)
    assert 4 <= tries <= 2 * 4096 / AdaptiveLength.MOST_BETWEEN_PROBES, tries


def test_a_small_gain_is_not_worth_steps_of_another_size() -> None:
    def chosen(slope: float) -> int:
        lengths = AdaptiveLength(1)
        lengths.observe_rest(1, 5, 5.0)
        for _ in range(5):
            lengths.observe(1, 1, 2, 0.0, 1.0 + slope)
        return lengths.choose([0.5], 1, free)[0]

    assert chosen(slope=0.25) == 1, "1.5 tokens in 1.25 of the time"
    assert chosen(slope=0.42) == 0, "1.5 tokens in 1.42 of the time"


def test_interruptions_are_not_the_drafts_fault() -> None:
    machine = Machine(AdaptiveLength(8), 0.9, slope=0.05, draft=0.02)
    take = machine.lengths.observe

    def interrupted(*counts_and_seconds) -> None:
        *others, step_seconds = counts_and_seconds
        take(*others, step_seconds * (50 if machine.chance.random() < 0.05 else 1))

    machine.lengths.observe = interrupted
    machine.run(2000)
    assert sum(machine.chosen[200:]) > 3 * len(machine.chosen[200:])


def test_more_where_more_are_right() -> None:
    lengths = AdaptiveLength(8)
    machine = Machine(lengths, 0.8, slope=0.05)
    machine.run(200)
    chosen = lengths.choose([0.1, 0.5, 0.9, 0.97], 4, free)
    assert chosen == sorted(chosen) and chosen[0] < chosen[2] < chosen[3] <= 8


def test_nothing_before_a_plain_step_was_measured() -> None:
    lengths = AdaptiveLength(8)
    assert not lengths.wants_drafts() and lengths.plain_seconds(1) is None
    lengths.observe(1, 0, 1, 0.0, 1.0)
    assert lengths.wants_drafts() and lengths.plain_seconds(1) == 1.0
    assert 0 < lengths.choose([0.9], 1, free)[0] <= AdaptiveLength.FIRST_LENGTH


def test_what_was_not_chosen_is_not_rested_on() -> None:
    lengths = AdaptiveLength(8)
    lengths.observe_rest(1, 1, 1.0)
    assert lengths.wants_drafts() and lengths.rest() == 0, "there may be something to propose after the next token"
    assert lengths.choose([0.0], 1, free) == [0] and lengths.rest() == 1


def test_drafting_rests_now_and_then_to_see_what_a_plain_step_takes() -> None:
    machine = Machine(AdaptiveLength(8), 0.95, slope=0.05)
    machine.run(1000)
    machine.base, before = 0.2, machine.lengths.plain_seconds(1)
    machine.run(1000)
    assert before == pytest.approx(1.05) and machine.lengths.plain_seconds(1) == pytest.approx(0.25, rel=0.1)


def test_losses_end_it_whatever_the_estimates_say() -> None:
    """The estimated acceptance is always high, but no draft is accepted."""
    lengths = AdaptiveLength(4)
    lengths.observe_rest(1, 1, 1.0)
    lost, rest, resting = 0.0, 0, 0
    for _ in range(2000):
        if rest:
            rest -= 1
            if not rest:
                lengths.observe_rest(1, resting, float(resting))
            continue
        chosen = lengths.choose([0.95], 1, free)[0] if lengths.wants_drafts() else 0
        lengths.observe(1, chosen, 1, 0.0, 1.0 + chosen)
        rest = resting = lengths.rest()
        lost += chosen
    assert lost < AdaptiveLength.FIRST_CREDIT + 0.05 * 2000


def test_rows_of_a_step_are_bounded() -> None:
    for lengths in (FixedLength(16), AdaptiveLength(16)):
        for num_drafts in (0, 1):
            lengths.observe(100, num_drafts, 100, 0.0, 1.0)
        assert sum(lengths.choose([0.97] * 100, 100, free)) <= MAX_DRAFTS_PER_STEP
        assert sum(lengths.choose([0.97] * 200, 200, free)) == 0


def test_acceptance_counts_verified_drafts_and_forgets() -> None:
    acceptance = Acceptance(memory=10, strength=3)
    assert acceptance.rate(0.6) == pytest.approx(0.6)
    acceptance.add(8, 0)
    assert acceptance.rate(0.6) == pytest.approx(1.8 / 4), "one was verified, the seven after it were not"
    for _ in range(200):
        acceptance.add(4, 4)
    assert acceptance.rate(0.6) > 0.97
    for _ in range(40):
        acceptance.add(4, 0)
    assert acceptance.rate(0.6) < 0.2


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts()
    assert costs.at(3) is None
    costs.add(1, 1.0)
    assert costs.at(1) == costs.at(9) == 1.0
    costs.add(5, 3.0)
    assert costs.at(3) == pytest.approx(2.0) and costs.at(9) == pytest.approx(5.0)
    costs.add(7, 2.0)
    assert costs.at(6) == pytest.approx(2.5)
    assert costs.at(30) == pytest.approx(2.0), "more tokens never take less beyond what is known"


def test_costs_bear_with_interruptions_and_follow_changes() -> None:
    costs = StepCosts()
    for seconds in (9.0, 1.0, 1.2):
        costs.add(1, seconds)
    assert costs.at(1) == 1.0
    costs.add(1, 1000.0)
    assert costs.at(1) == pytest.approx(1.1)
    for _ in range(60):
        costs.add(1, 2.0)
    assert costs.at(1) == pytest.approx(2.0, rel=0.01)


def test_costs_that_do_not_come_again_are_forgotten() -> None:
    costs = StepCosts()
    costs.add(9, 50.0)
    for _ in range(2 * StepCosts.FORGET_AFTER):
        costs.add(1, 1.0)
    assert costs.at(9) == 1.0
