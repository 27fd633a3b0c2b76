"""Turns of engines: one at a time, first come first served, also when a step raises."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from pace.llm.engine.turns import StepTurns


def test_one_at_a_time_and_in_order():
    turns, order = StepTurns(), []

    def take(name: int) -> None:
        with turns:
            order.append(name)

    with turns:
        threads = []
        for name in range(20):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            while len(turns._waiting) <= name:
                time.sleep(0.0005)
        assert order == []
    for thread in threads:
        thread.join(5)
    assert order == [*range(20)]


def test_no_thread_takes_two_turns_while_another_waits():
    turns, counts, stop = StepTurns(), Counter(), threading.Event()
    inside = 0

    def step(name: str, seconds: float) -> None:
        nonlocal inside
        while not stop.is_set():
            with turns:
                inside += 1
                assert inside == 1
                counts[name] += 1
                time.sleep(seconds)
                inside -= 1

    threads = [threading.Thread(target=step, args=pair) for pair in (("quick", 0.0), ("slow", 0.002), ("other", 0.001))]
    for thread in threads:
        thread.start()
    while len(counts) < len(threads):
        time.sleep(0.001)
    before = counts.copy()
    time.sleep(0.2)
    stop.set()
    for thread in threads:
        thread.join(5)
    taken = (counts - before).values()
    assert min(taken) >= 0.5 * max(taken), counts  # an unfair lock gives most turns to the quick one


def test_an_error_ends_the_turn():
    turns = StepTurns()
    with pytest.raises(ZeroDivisionError), turns:
        raise ZeroDivisionError
    with turns:
        pass
