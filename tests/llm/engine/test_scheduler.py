"""Sharing a step: within its budgets, first come first served, decoding together with prefill."""

from __future__ import annotations

import random

import pytest

from pace.llm.sequence import Sequence
from pace.llm.text.stopping_criteria import NeverStops
from tests.llm.fake_model import make_engine


def make_sequence(length: int) -> Sequence:
    return Sequence([1] * length, None, NeverStops(), 4096)


def run_step(scheduler, spans) -> None:
    """Does the engine's part of a step, and appends a token for each span that has logit rows."""
    for span in spans:
        scheduler.cache.commit(span.sequence, span.end)
        if span.num_rows:
            span.sequence.append(2)
        scheduler.settle(span.sequence)


@pytest.mark.parametrize("name", ["max_tokens_per_step", "max_sequences_per_step", "max_logit_rows_per_step"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_limits_are_checked(name: str, value) -> None:
    with pytest.raises(ValueError, match=name):
        make_engine(**{name: value})


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    scheduler = make_engine(max_tokens_per_step=10).scheduler
    short, long = make_sequence(3), make_sequence(100)
    scheduler.add(short)
    run_step(scheduler, scheduler.schedule())
    scheduler.add(long)
    for step in range(5):
        spans = scheduler.schedule()
        assert [(span.sequence, span.num_tokens) for span in spans] == [(short, 1), (long, 9)]
        assert spans[1].start == 9 * step and spans[1].num_rows == 0
        run_step(scheduler, spans)


def test_no_one_overtakes_a_sequence_that_does_not_fit_yet() -> None:
    scheduler = make_engine(num_blocks=6).scheduler
    first, large, small = make_sequence(60), make_sequence(70), make_sequence(5)
    for sequence in (first, large, small):
        scheduler.add(sequence)
    assert [span.sequence for span in scheduler.schedule()] == [first]
    assert list(scheduler.waiting) == [large, small]
    first.finish_reason = "stop"
    scheduler.settle(first)
    assert [span.sequence for span in scheduler.schedule()] == [large]


@pytest.mark.parametrize("seed", range(8))
def test_every_step_keeps_its_limits_and_gets_on(seed: int) -> None:
    chance = random.Random(seed)
    limits = {
        "max_tokens_per_step": chance.randint(1, 40),
        "max_sequences_per_step": chance.randint(1, 6),
        "max_logit_rows_per_step": chance.randint(1, 9),
    }
    scheduler = make_engine(num_blocks=12, **limits).scheduler
    sequences = [make_sequence(chance.randint(1, 90)) for _ in range(12)]
    for sequence in sequences:
        if chance.random() < 0.3:
            sequence.wanted_from = chance.randrange(len(sequence.tokens))
        sequence.max_length = len(sequence.tokens) + chance.randint(1, 60)
        scheduler.add(sequence)
    for _ in range(20_000):
        spans = scheduler.schedule()
        if not spans:
            break
        assert sum(span.num_tokens for span in spans) <= limits["max_tokens_per_step"]
        assert len(spans) <= limits["max_sequences_per_step"] >= len(scheduler.running)
        assert sum(span.num_rows for span in spans if span.sequence.wanted_from is not None) <= limits[
            "max_logit_rows_per_step"
        ] + len(spans)
        assert all(span.num_tokens >= 1 and span.start == span.sequence.num_computed for span in spans)
        for span in spans:
            scheduler.cache.commit(span.sequence, span.end)
            if span.sequence.wanted_from is None and span.num_rows:
                span.sequence.append(2)
                if len(span.sequence.tokens) == span.sequence.max_length:
                    span.sequence.finish_reason = "length"
            scheduler.settle(span.sequence)
        scheduler.cache.check_integrity(scheduler.sequences())
    assert not scheduler.running and not scheduler.waiting, "all are done, or parked"
    assert all(sequence.is_finished or sequence.wanted_from is not None for sequence in sequences)


def test_the_oldest_idle_session_goes_first() -> None:
    scheduler = make_engine(num_blocks=4).scheduler
    idle = [make_sequence(16), make_sequence(16)]
    for sequence in idle:
        sequence.wanted_from = 15
        scheduler.add(sequence)
        for span in scheduler.schedule():
            scheduler.cache.commit(span.sequence, span.end)
            scheduler.settle(span.sequence)
    assert list(scheduler.parked) == idle
    scheduler.add(make_sequence(40))
    assert len(scheduler.schedule()) == 1
    assert not idle[0].block_table and idle[1].block_table


def test_who_was_preempted_is_next() -> None:
    scheduler = make_engine(num_blocks=4).scheduler
    first, second, third = make_sequence(31), make_sequence(16), make_sequence(16)
    for sequence in (first, second, third):
        scheduler.add(sequence)
    while not (list(scheduler.running) == [first] and scheduler.waiting):
        run_step(scheduler, scheduler.schedule())
    assert list(scheduler.waiting) == [second, third]


def test_the_last_in_the_order_gives_way() -> None:
    scheduler = make_engine(num_blocks=6).scheduler
    first, second, third = make_sequence(30), make_sequence(16), make_sequence(16)
    third.priority = -1
    for sequence in (third, first, second):
        scheduler.add(sequence)
    for _ in range(3):
        run_step(scheduler, scheduler.schedule())
    assert list(scheduler.running) == [first, second, third] and scheduler.cache.num_free_blocks == 0
    run_step(scheduler, scheduler.schedule())
    assert list(scheduler.running) == [first, second] and scheduler.waiting == [third]
    assert third.stats.num_preemptions == 1 and not third.block_table


def test_a_prompt_of_higher_priority_is_read_before_one_that_is_being_read() -> None:
    scheduler = make_engine(max_tokens_per_step=10).scheduler
    long, urgent = make_sequence(100), make_sequence(25)
    urgent.priority = 1
    scheduler.add(long)
    run_step(scheduler, scheduler.schedule())
    scheduler.add(urgent)
    parts = []
    for _ in range(4):
        spans = scheduler.schedule()
        parts.append([(span.sequence, span.num_tokens) for span in spans])
        run_step(scheduler, spans)
    assert parts == [[(urgent, 10)], [(urgent, 10)], [(urgent, 5), (long, 5)], [(urgent, 1), (long, 9)]]


def test_a_session_arrives_anew_with_every_append() -> None:
    """Otherwise a session as old as the engine would overtake all requests."""
    scheduler = make_engine(max_sequences_per_step=1).scheduler
    session, running, waiting = make_sequence(5), make_sequence(5), make_sequence(5)
    session.wanted_from = 4
    scheduler.add(session)
    for span in scheduler.schedule():
        scheduler.cache.commit(span.sequence, span.end)
        scheduler.settle(span.sequence)
    assert list(scheduler.parked) == [session]
    scheduler.add(running)
    scheduler.add(waiting)
    session.tokens.append(1)
    scheduler.add(session)
    assert [span.sequence for span in scheduler.schedule()] == [running] and scheduler.waiting == [waiting, session]
