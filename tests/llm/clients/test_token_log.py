"""Logs lose no event, and notify event loops: of all logs, in order, but not once for every token."""

from __future__ import annotations

import asyncio
import threading

from pace.llm.clients import notifiers
from pace.llm.clients.notifiers import LoopNotifier
from pace.llm.clients.token_log import TokenLog
from pace.llm.sequence import Sequence


async def passes_of_the_loop(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


class Row:
    """A sequence with a log, whose changes are noted."""

    def __init__(self, notified: list[Row]) -> None:
        self.log, self.sequence = TokenLog(), Sequence([1], None, None, 100)
        self.log.add(self.sequence)
        self.changed = lambda: notified.append(self)
        self.log.subscribe(LoopNotifier(lambda: self.changed()))

    def token(self) -> None:
        self.sequence.append(7)
        self.log.token(self.sequence, 7, None)

    def end(self) -> None:
        self.log.end(self.sequence, "stop", None)


def make_rows(number: int, notified: list[Row]) -> list[Row]:
    return [Row(notified) for _ in range(number)]


def test_one_wake_notifies_all_rows_in_order():
    async def play():
        notified: list[Row] = []
        rows = make_rows(20, notified)
        for row in rows:
            row.token()
        assert notified == []
        await passes_of_the_loop(1)
        assert notified == rows

    asyncio.run(play())


def test_a_row_that_changes_while_others_are_notified_is_notified_again():
    async def play():
        notified: list[Row] = []
        first, second = make_rows(2, notified)
        note_second = second.changed

        def end_the_first() -> None:
            note_second()
            first.end()

        second.changed = end_the_first
        for row in (first, second):
            row.token()
        await passes_of_the_loop(3)
        assert notified == [first, second, first]

    asyncio.run(play())


def test_between_two_wakes_only_first_tokens_and_ends_are_notified(monkeypatch):
    monkeypatch.setattr(notifiers, "REST_SECONDS", 0.3)

    async def play():
        notified: list[Row] = []
        first, second = make_rows(2, notified)
        first.token()
        await passes_of_the_loop(3)
        first.token()
        await passes_of_the_loop(3)
        assert notified == [first]
        second.token()
        await passes_of_the_loop(3)
        assert notified == [first, first, second]
        second.token()
        while len(notified) < 4:  # until the rest has finished
            await asyncio.sleep(0.01)
        assert notified == [first, first, second, second]

    asyncio.run(play())


def test_a_log_that_is_read_while_it_is_written_loses_no_event():
    log, sequence = TokenLog(), Sequence([1], None, None, 5000)
    log.add(sequence)

    def write() -> None:
        for token in range(4000):
            sequence.append(token)
            log.token(sequence, token, None)
        log.end(sequence, "length", None)

    writer = threading.Thread(target=write)
    writer.start()
    events = log.drain()
    while events[-1].finish_reason is None:
        events += log.drain()
    writer.join()
    assert [event.token for event in events] == [*range(4000), None]
    assert log.is_complete and not log.events and events[-1].num_tokens == 4000


def test_a_log_notifies_subscribers_only_while_they_are_subscribed():
    notified: list[bool] = []

    class Listener:
        def notify(self, is_urgent: bool) -> None:
            notified.append(is_urgent)

    log, sequence = TokenLog(), Sequence([1], None, None, 100)
    log.add(sequence)
    with log.subscribed(Listener()):
        for token in (7, 8):
            sequence.append(token)
            log.token(sequence, token, None)
        log.rollback(sequence, 1)
        log.end(sequence, "stop", None)
    log.rollback(sequence, 1)
    assert notified == [True, False, False, True], "the first token and the end are urgent"


def test_a_wait_for_what_does_not_come_ends_in_time_whatever_else_comes():
    async def play():
        notifier = LoopNotifier()
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, notifier.wake)
        loop.call_later(0.02, lambda: (notifier.wake(), notifier._time_out()))  # in the same pass
        return await notifier.wait_for(lambda: False, 0.5), await notifier.wait_for(lambda: True, 0.0)

    assert asyncio.run(asyncio.wait_for(play(), 20)) == (False, True)
