"""The lock that is given in order, and that an interrupt cannot lose."""

from __future__ import annotations

import threading
import time

from pace.llm.turns import TurnLock


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
