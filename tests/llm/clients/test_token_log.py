"""Logs lose no event, and notify event loops: of all logs, in order, but not once for every token. No pass of the loop
is long."""

from __future__ import annotations

import asyncio
import itertools
import threading

from pace.llm.clients import notifiers
from pace.llm.clients.notifiers import GAP_PASSES, READERS_PER_TURN, SLICE_READERS, LoopNotifier, turn
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
        assert notified == rows[: len(notified)] != []
        await passes_of_the_loop(20 * (GAP_PASSES + 1))
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


class Passes(list):
    """Passes of the loop in which tasks go on, each a number and the kind of task."""

    def __init__(self) -> None:
        self.number = 0
        asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._count)

    def note(self, kind: str, in_next: bool = False) -> None:
        """Notes a task that goes on in this pass, or was woken for the next one."""
        self.append((self.number + in_next, kind))

    @property
    def slices(self) -> list[list[str]]:
        """The kinds of the tasks that went on in a pass, for each pass in which any did."""
        return [[kind for _, kind in group] for _, group in itertools.groupby(self, lambda noted: noted[0])]

    def check_gaps(self) -> None:
        numbers = sorted({number for number, _ in self})
        gaps = [after - before - 1 for before, after in itertools.pairwise(numbers)]
        assert all(gap >= GAP_PASSES for gap in gaps), f"passes between two slices: {gaps}"


async def with_more_tokens(number: int, passes: Passes) -> list[Row]:
    """Rows that will be notified of their second tokens in the next pass, and note it as "row"."""
    rows = make_rows(number, [])
    for row in rows:
        row.token()
    await passes_of_the_loop(number * (GAP_PASSES + 2))  # all first tokens are notified, and the rest is over
    for row in rows:
        row.changed = lambda: passes.note("row", in_next=True)
        row.token()
    return rows


async def take_turn(passes: Passes) -> None:
    await turn()
    passes.note("turn")


def test_a_pass_of_the_loop_notifies_a_slice_of_the_rows(monkeypatch):
    monkeypatch.setattr(notifiers, "REST_SECONDS", 0.0)
    monkeypatch.setattr(notifiers, "REST_SECONDS_PER_READER", 0.0)

    async def play():
        passes = Passes()
        await with_more_tokens(2 * SLICE_READERS + 3, passes)
        await passes_of_the_loop(4 * (GAP_PASSES + 1))
        assert [len(each) for each in passes.slices] == [SLICE_READERS, SLICE_READERS, 3]
        passes.check_gaps()

    asyncio.run(play())


def test_new_requests_have_their_turns_in_order_and_a_few_in_a_pass():
    per_pass = SLICE_READERS // READERS_PER_TURN

    async def play():
        order, passes = [], Passes()

        async def come(number: int) -> None:
            await take_turn(passes)
            order.append(number)

        tasks = [asyncio.create_task(come(number)) for number in range(3 * per_pass)]
        await passes_of_the_loop(1)
        assert order == [*range(per_pass)], "the first wait for nothing"
        leaves = per_pass + 1
        tasks[leaves].cancel()
        await asyncio.wait(tasks)
        assert order == [number for number in range(3 * per_pass) if number != leaves]
        assert [len(each) for each in passes.slices] == [per_pass, per_pass, per_pass - 1]
        passes.check_gaps()

    asyncio.run(play())


def test_neither_new_requests_nor_more_tokens_wait_for_all_of_the_other_kind(monkeypatch):
    monkeypatch.setattr(notifiers, "REST_SECONDS", 0.0)
    monkeypatch.setattr(notifiers, "REST_SECONDS_PER_READER", 0.0)

    async def play():
        passes = Passes()
        await with_more_tokens(3 * SLICE_READERS, passes)
        tasks = [asyncio.create_task(take_turn(passes)) for _ in range(3 * SLICE_READERS)]
        await asyncio.wait(tasks)
        both = [each for each in passes.slices if {*each} == {"row", "turn"}]
        assert len(both) >= 4
        assert all(each.count("turn") * READERS_PER_TURN + each.count("row") <= SLICE_READERS for each in both)
        passes.check_gaps()

    asyncio.run(play())


def test_a_first_token_waits_for_no_reader_of_more(monkeypatch):
    monkeypatch.setattr(notifiers, "REST_SECONDS", 0.0)
    monkeypatch.setattr(notifiers, "REST_SECONDS_PER_READER", 0.0)

    async def play():
        passes = Passes()
        await with_more_tokens(3 * SLICE_READERS, passes)
        await passes_of_the_loop(1)
        (late,) = make_rows(1, [])
        late.changed = lambda: passes.note("late", in_next=True)
        late.token()
        await passes_of_the_loop(5 * (GAP_PASSES + 1))
        assert passes.slices[0] == ["row"] * SLICE_READERS
        assert passes.slices[1][0] == "late" and len(passes) == 3 * SLICE_READERS + 1

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
        assert notified == [first, second], "only the row with a first token"
        second.token()
        while len(notified) < 4:  # until the rest has finished
            await asyncio.sleep(0.01)
        await passes_of_the_loop(3 * (GAP_PASSES + 1))
        assert notified == [first, second, first, second]

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


def test_tasks_that_follow_logs_of_several_threads_miss_nothing(monkeypatch):
    monkeypatch.setattr(notifiers, "REST_SECONDS", 0.001)
    monkeypatch.setattr(notifiers, "REST_SECONDS_PER_READER", 0.0)

    def write(rows: list[Row]) -> None:
        for _ in range(200):
            for row in rows:
                row.token()
        for row in rows:
            row.end()

    async def follow(row: Row) -> int:
        notifier, num_read = LoopNotifier(), 0
        with row.log.subscribed(notifier):
            while not (num_read and row.log.events[num_read - 1].finish_reason):
                await notifier.wait_for(lambda: len(row.log.events) > num_read, 60.0)
                num_read = len(row.log.events)
        notifier.close()
        return num_read

    async def play() -> list[int]:
        rows = make_rows(30, [])
        writers = [threading.Thread(target=write, args=(rows[number::2],)) for number in range(2)]
        tasks = [asyncio.create_task(follow(row)) for row in rows]
        await passes_of_the_loop(1)
        for writer in writers:
            writer.start()
        return await asyncio.gather(*tasks)

    assert asyncio.run(asyncio.wait_for(play(), 20)) == [201] * 30


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


async def wait_a_little(notifier: LoopNotifier, seconds: float) -> bool:
    """Waits at most `seconds` for something that comes in the next pass."""
    came: list[bool] = []
    asyncio.get_running_loop().call_soon(came.append, True)
    asyncio.get_running_loop().call_soon(notifier.wake)
    return await notifier.wait_for(lambda: bool(came), seconds)


def test_many_waits_of_a_notifier_share_a_timer():
    async def play():
        notifier, loop = LoopNotifier(), asyncio.get_running_loop()
        for _ in range(50):
            assert await wait_a_little(notifier, 30.0)
        timers = [timer for timer in loop._scheduled if not timer.cancelled()]
        assert len(loop._scheduled) == len(timers) == 1
        notifier.close()
        assert timers[0].cancelled()

    asyncio.run(play())


def test_each_wait_of_a_notifier_lasts_its_own_time():
    async def play():
        notifier, loop = LoopNotifier(), asyncio.get_running_loop()
        for before, seconds in ((0.02, 0.06), (30.0, 0.01)):
            assert await wait_a_little(notifier, before)  # its timer is still there
            begin = loop.time()
            assert not await notifier.wait_for(lambda: False, seconds)
            assert loop.time() - begin >= seconds - 0.001  # the resolution of timers
        loop.call_later(0.01, notifier.wake)
        assert not await notifier.wait_for(lambda: False, 0.03)
        notifier.close()

    asyncio.run(asyncio.wait_for(play(), 20))
