"""How the loop hears of rows: all of them, in order, and never so many at once that others wait."""

from __future__ import annotations

import asyncio

from pace.server.rows import ROWS_AT_ONCE, Row, Wakeups


async def passes_of_the_loop(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def make_rows(wakeups: Wakeups, number: int, told: list[Row]) -> list[Row]:
    rows = [Row(None, wakeups.notify) for _ in range(number)]
    for row in rows:
        row.changed = lambda row=row: told.append(row)
    return rows


def test_a_wake_is_cut_into_passes_of_the_loop():
    async def play():
        told: list[Row] = []
        rows = make_rows(Wakeups(asyncio.get_running_loop()), 5 * ROWS_AT_ONCE + 1, told)
        for row in rows:
            row.token(None, 7, None)
        counts = []
        while len(told) < len(rows):
            await asyncio.sleep(0)
            counts.append(len(told))
        steps = [later - earlier for earlier, later in zip([0, *counts], counts)]
        assert max(steps) == ROWS_AT_ONCE and told == rows

    asyncio.run(play())


def test_a_row_that_changes_while_others_are_told_is_told_again():
    async def play():
        told: list[Row] = []
        wakeups = Wakeups(asyncio.get_running_loop())
        rows = make_rows(wakeups, 3 * ROWS_AT_ONCE, told)
        for row in rows:
            row.token(None, 7, None)
        while not told:
            await asyncio.sleep(0)
        told[0].end(None, "stop", None)  # urgent: in the middle of the wake
        late = make_rows(wakeups, 1, told)[0]
        late.token(None, 7, None)
        await passes_of_the_loop(12)
        assert told == [*rows, rows[0], late]

    asyncio.run(play())


def test_between_two_wakes_only_first_tokens_and_ends_are_told():
    async def play():
        told: list[Row] = []
        first, second = make_rows(Wakeups(asyncio.get_running_loop()), 2, told)
        first.token(None, 7, None)
        await passes_of_the_loop(3)
        first.token(None, 8, None)
        await passes_of_the_loop(3)
        assert told == [first]
        second.token(None, 7, None)
        await passes_of_the_loop(3)
        assert told == [first, first, second]
        second.token(None, 8, None)
        await asyncio.sleep(0.05)  # the rest is over
        assert told == [first, first, second, second]

    asyncio.run(play())
