"""Notification of the event loop about changed rows: all rows, in order, but not once for every token."""

from __future__ import annotations

import asyncio

from pace.llm.clients.wakeups import Wakeups
from pace.server.rows import Row


async def passes_of_the_loop(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def make_rows(wakeups: Wakeups, number: int, told: list[Row]) -> list[Row]:
    rows = [Row(None, wakeups.notify) for _ in range(number)]
    for row in rows:
        row.changed = lambda row=row: told.append(row)
    return rows


def test_one_wake_tells_all_rows_in_order():
    async def play():
        told: list[Row] = []
        rows = make_rows(Wakeups.of_running_loop(), 20, told)
        for row in rows:
            row.token(None, 7, None)
        assert told == []
        await passes_of_the_loop(1)
        assert told == rows

    asyncio.run(play())


def test_a_row_that_changes_while_others_are_told_is_told_again():
    async def play():
        told: list[Row] = []
        first, second = make_rows(Wakeups.of_running_loop(), 2, told)
        tell_second = second.changed

        def end_the_first() -> None:
            tell_second()
            first.end(None, "stop", None)

        second.changed = end_the_first
        for row in (first, second):
            row.token(None, 7, None)
        await passes_of_the_loop(3)
        assert told == [first, second, first]

    asyncio.run(play())


def test_between_two_wakes_only_first_tokens_and_ends_are_told():
    async def play():
        told: list[Row] = []
        first, second = make_rows(Wakeups.of_running_loop(), 2, told)
        first.token(None, 7, None)
        await passes_of_the_loop(3)
        first.token(None, 8, None)
        await passes_of_the_loop(3)
        assert told == [first]
        second.token(None, 7, None)
        await passes_of_the_loop(3)
        assert told == [first, first, second]
        second.token(None, 8, None)
        await asyncio.sleep(0.05)  # the rest has finished
        assert told == [first, first, second, second]

    asyncio.run(play())
