"""Turns of engines: one at a time, first come first served, also when a step raises."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from pace.llm.engine.turns import StepTurns
from tests.waiting import PATIENCE, wait_until


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
            wait_until(lambda name=name: len(turns._waiting) > name)
        assert order == []
    for thread in threads:
        thread.join(PATIENCE)
    assert order == [*range(20)]


def test_no_thread_takes_two_turns_while_another_waits():
    """When a thread has its turn, all threads that waited before it have had theirs."""
    turns, counts, stop = StepTurns(), Counter(), threading.Event()
    inside, overtaken = 0, []

    def step(name: str, seconds: float) -> None:
        nonlocal inside
        while not stop.is_set():
            earlier = list(turns._waiting)
            with turns:
                inside += 1
                assert inside == 1
                overtaken.extend(one for one in list(turns._waiting) if one in earlier)
                counts[name] += 1
                time.sleep(seconds)
                inside -= 1

    threads = [threading.Thread(target=step, args=pair) for pair in (("quick", 0.0), ("slow", 0.002), ("other", 0.001))]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(counts) == len(threads) and min(counts.values()) >= 40)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not overtaken, f"{len(overtaken)} times in {sum(counts.values())}"


def test_an_error_ends_the_turn():
    turns = StepTurns()
    with pytest.raises(ZeroDivisionError), turns:
        raise ZeroDivisionError
    with turns:
        pass
