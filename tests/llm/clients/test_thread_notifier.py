"""Waiting threads are woken at once for the first and the last item, and in batches for those between."""

from __future__ import annotations

import threading
import time

from pace.llm.clients import notifiers
from pace.llm.clients.notifiers import ThreadNotifier
from tests.waiting import PATIENCE, wait_until


class Belt:
    """Passes items from one thread to another, and records how many are taken at each wake."""

    def __init__(self, num_things: int) -> None:
        self.notifier = ThreadNotifier()
        self.things: list[float] = []
        self.num_things = num_things
        self.handfuls: list[int] = []
        self.taker = threading.Thread(target=self._take)
        self.taker.start()

    def put(self) -> None:
        self.things.append(time.perf_counter())
        self.notifier.notify(is_urgent=len(self.things) == self.num_things)

    def _take(self) -> None:
        taken = 0
        while taken < self.num_things:
            assert self.notifier.wait_for(lambda: len(self.things) > taken)
            there = len(self.things)
            self.handfuls.append(there - taken)
            taken = there


def test_what_comes_fast_is_taken_by_the_handful(monkeypatch) -> None:
    monkeypatch.setattr(notifiers, "REST_SECONDS", 0.2)
    belt = Belt(50)
    for _ in range(50):
        belt.put()
        time.sleep(0.001)
    belt.taker.join(PATIENCE)
    # After each rest of 0.2 s, a batch, and the next item. On a free machine all come in 0.1 s.
    most = 4 + 2 * (belt.things[-1] - belt.things[0]) / 0.2
    assert sum(belt.handfuls) == 50 and len(belt.handfuls) <= most, f"handfuls of {belt.handfuls}, at most {most:.1f}"


def test_what_comes_slowly_is_taken_one_by_one(monkeypatch) -> None:
    monkeypatch.setattr(notifiers, "REST_SECONDS", 0.0)
    belt = Belt(20)
    for number in range(20):
        belt.put()
        wait_until(lambda number=number: len(belt.handfuls) > number)
    belt.taker.join(PATIENCE)
    assert belt.handfuls == [1] * 20


def test_the_first_and_the_last_wait_for_no_rest(monkeypatch) -> None:
    monkeypatch.setattr(notifiers, "REST_SECONDS", 1000.0)
    belt = Belt(3)
    belt.put()
    wait_until(lambda: belt.handfuls == [1])
    belt.put()  # the taker rests and is not woken
    time.sleep(0.05)
    assert belt.handfuls == [1]
    belt.put()
    belt.taker.join(PATIENCE)
    assert belt.handfuls == [1, 2]
    assert not belt.notifier._asleep and not belt.notifier._at_rest


def test_who_gives_up_leaves_nothing_behind() -> None:
    notifier = ThreadNotifier()
    for _ in range(5):
        assert not notifier.wait_for(lambda: False, time.perf_counter() + 0.001)
    assert not notifier._asleep and not notifier._at_rest
