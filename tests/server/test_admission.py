"""The admission queue: order, bounds, and places that are returned for every way in which their holder can leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from pace.server.admission import Admission
from pace.server.errors import ApiError
from pace.server.limits import Limits
from tests.waiting import PATIENCE


def make(max_sequences=1, **limits):
    rejected: Counter[str] = Counter()
    return Admission(Limits(**limits), max_sequences, lambda why: rejected.update([why])), rejected


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_have_a_bound_and_a_bound_for_each_key():
    admission, rejected = make(2, max_queue=1, max_per_key=2)
    with admission.request("a"), admission.request("a"):
        with pytest.raises(ApiError) as caught, admission.request("a"):
            pass
        assert caught.value.status == 429 and int(caught.value.headers["retry-after"]) >= 1
        with admission.request("b"), pytest.raises(ApiError), admission.request("c"):
            pass
    assert rejected == {"key": 1, "queue": 1}
    assert admission.num_requests == 0


def test_turns_come_in_order_and_priority_is_a_head_start():
    async def play():
        admission, _ = make(1)
        order, release = [], asyncio.Event()

        async def hold(name, priority=0, rows=2):
            async with admission.rows(rows, 10, priority):
                order.append(name)
                await release.wait()

        tasks = [asyncio.create_task(hold("first"))]
        await settle()
        tasks += [asyncio.create_task(hold(name, priority)) for name, priority in (("b", 0), ("c", 0), ("d", 1))]
        await settle()
        assert order == ["first"] and admission.num_waiting == 3
        release.set()
        await asyncio.gather(*tasks)
        assert order == ["first", "d", "b", "c"] and admission.num_waiting == 0

    asyncio.run(play())


def test_whoever_is_just_leaving_is_passed_over():
    """A cancelled task gets its CancelledError in a later callback; until then it is still in the queue."""

    async def play():
        admission, _ = make(1)

        async def hold(seconds):
            async with admission.rows(2, 10, 0):
                await asyncio.sleep(seconds)

        first = asyncio.create_task(hold(10 * PATIENCE))
        await settle()
        leaving, next_one = asyncio.create_task(hold(0)), asyncio.create_task(hold(0))
        await settle()
        first.cancel()
        leaving.cancel()
        ends = await asyncio.gather(first, leaving, next_one, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError, asyncio.CancelledError, type(None)]
        await asyncio.wait_for(hold(0), PATIENCE)  # the place is free again

    asyncio.run(play())


def test_whoever_leaves_hands_its_turn_on():
    async def play():
        admission, _ = make(1)
        order = []

        async def hold(name, seconds):
            async with admission.rows(2, 10, 0):
                order.append(name)
                await asyncio.sleep(seconds)

        first = asyncio.create_task(hold("first", 10 * PATIENCE))
        await settle()
        second, third = asyncio.create_task(hold("second", 0)), asyncio.create_task(hold("third", 0))
        await settle()
        first.cancel()
        await asyncio.sleep(0)
        second.cancel()  # its turn has come, or comes next
        with suppress(asyncio.CancelledError):
            await first
        with suppress(asyncio.CancelledError):
            await second
        await asyncio.wait_for(third, PATIENCE)
        assert order[-1] == "third" and admission.num_waiting == 0

    asyncio.run(play())


def test_many_small_ones_fill_what_a_large_one_leaves():
    async def play():
        admission, _ = make(4)
        running, release = [], asyncio.Event()

        async def hold(rows):
            async with admission.rows(rows, 1, 0):
                running.append(rows)
                await release.wait()

        large = asyncio.create_task(hold(8))
        await settle()
        small = [asyncio.create_task(hold(1)) for _ in range(12)]
        await settle()
        assert running == [8]
        release.set()
        await asyncio.gather(large, *small)
        assert len(running) == 13

    asyncio.run(play())


def test_what_waits_has_a_bound_in_seconds():
    async def play():
        admission, rejected = make(1, max_wait=1.0)
        admission.measured(1000, 1.0)
        release = asyncio.Event()

        async def hold(tokens):
            async with admission.rows(2, tokens, 0):
                await release.wait()

        tasks = [asyncio.create_task(hold(10 * PATIENCE))]
        await settle()
        tasks.append(asyncio.create_task(hold(5000)))
        await settle()
        assert admission.seconds_waiting == pytest.approx(5.0)
        with pytest.raises(ApiError) as caught:
            await hold(1)
        assert caught.value.headers["retry-after"] == "5" and rejected == {"wait": 1}
        with pytest.raises(ApiError), admission.request(None):
            pass  # before any work starts for it
        assert rejected == {"wait": 2} and admission.num_requests == 0
        release.set()
        await asyncio.gather(*tasks)

    asyncio.run(play())
