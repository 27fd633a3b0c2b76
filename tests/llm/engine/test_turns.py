"""The lock that is given in order, and that an interrupt cannot lose."""

from __future__ import annotations

import threading
import time

import pytest

from pace.llm.engine.turns import TurnLock
from tests.support import functions_in, interrupted_before_line


def test_turns_are_in_order_of_asking() -> None:
    lock, order = TurnLock(), []

    def ask(name: int) -> None:
        with lock:
            order.append(name)

    with lock:
        threads = [threading.Thread(target=ask, args=(name,)) for name in range(6)]
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(lock._queue) < count:
                time.sleep(0.001)
    lock.__enter__()  # asked for after the six: whoever releases does not get it back before them
    assert order == list(range(6))
    lock.__exit__(None, None, None)
    for thread in threads:
        thread.join(10)


def test_a_lock_that_could_not_be_released_is_taken_over_by_its_owner() -> None:
    lock = TurnLock()
    lock.__enter__()  # and an interrupt comes before __exit__
    with lock:
        pass
    other = threading.Thread(target=lock.__enter__)
    other.start()
    other.join(10)
    assert not other.is_alive(), "the other thread has it"


def test_an_interrupted_release_loses_no_one_who_waits() -> None:
    """`with` lines do not count: between a C lock's call and its block Python lets no signal through."""
    number, goes_on = 0, True
    while goes_on:
        number += 1
        lock = TurnLock()
        lock.__enter__()
        other = threading.Thread(target=lambda: lock.__enter__() and lock.__exit__(None, None, None), daemon=True)
        other.start()
        while not lock._queue:
            time.sleep(0.001)
        goes_on = interrupted_before_line(
            number, lambda: lock.__exit__(None, None, None), functions_in("turns.py"), lambda line: "with " in line
        )
        if goes_on:
            lock.__enter__()  # asks again, as Engine.abort does
            lock.__exit__(None, None, None)
        other.join(10)
        assert not other.is_alive(), f"lost by an interrupt before line {number} of the release"
    assert number > 4


def test_asking_from_inside_is_an_error_and_keeps_the_lock() -> None:
    lock = TurnLock()
    with lock:
        lock.is_inside = True
        with pytest.raises(ValueError, match="within its own step"), lock:
            pass
        assert not lock.call_if_free(pytest.fail)
        lock.is_inside = False


def is_free(lock: TurnLock) -> bool:
    """Whether another thread gets it."""
    other = threading.Thread(target=lambda: lock.__enter__() and lock.__exit__(None, None, None), daemon=True)
    other.start()
    other.join(0.3)
    return not other.is_alive()


def test_an_interrupted_finaliser_keeps_no_lock() -> None:
    """It may be the last that its thread does with the engine: who waits cannot wait for it to ask again."""
    lock, calls = TurnLock(), []
    assert lock.call_if_free(lambda: calls.append(is_free(lock))) and calls == [False], "held meanwhile"
    for number in range(1, 8):  # up to the call of `action`
        lock = TurnLock()
        assert interrupted_before_line(
            number,
            lambda: lock.call_if_free(calls.clear),
            lambda code: code.co_name == "call_if_free",
            lambda line: "with " in line,
        )
        assert calls and is_free(lock), f"kept by an interrupt before line {number}"
