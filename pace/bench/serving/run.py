"""Runs a load test, and keeps a record of every request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from pace.bench.serving.http import BadResponse, Client
from pace.bench.serving.record import Record, RequestFailed, error_message
from pace.bench.serving.workload import Load


@dataclass(frozen=True)
class Run:
    """A finished load test."""

    records: list[Record]
    """Records of the requests, in the order in which they were due."""
    start: float
    duration: float
    """Seconds until the last request ended."""
    cpu_seconds: float
    """CPU time of this process during the run."""


async def find_model(client: Client) -> str:
    """Returns the first model that the server lists. Raises ValueError if it lists none, ConnectionError if it does not
    answer."""
    try:
        status, body = await client.get("/v1/models")
    except (OSError, BadResponse) as error:
        raise ConnectionError(f"{_place(client)}: no answer ({error})") from None
    if status != 200:
        raise ValueError(f"{_place(client)}/v1/models: {status}: {error_message(body)}")
    try:
        return json.loads(body)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise ValueError(f"{_place(client)}/v1/models lists no model; name one") from None


async def warm_up(client: Client, load: Load, bodies: list[bytes], timeout: float) -> None:
    """Sends requests one by one. Raises ValueError with the reason if one fails, because all others would fail too."""
    for body in bodies:
        record = Record(time.perf_counter())
        await _exchange(client, load, body, record, timeout)
        if record.failure is not None:
            why = f"({record.failure.kind}): {record.failure.message}"
            raise ValueError(f"{_place(client)}{load.endpoint}: a first request failed {why}")


async def run(
    client: Client, load: Load, bodies: list[bytes], timeout: float, report: Callable[[int], object] = lambda done: None
) -> Run:
    """Sends each of `bodies` when it is due. `timeout`: seconds after which a request is given up. `report` is called
    with 1 whenever a request ends."""
    slots = asyncio.Semaphore(load.max_concurrency or len(bodies))
    arrivals = load.arrivals() if load.is_open_loop else None
    records: list[Record] = []
    cpu_before, start = time.process_time(), time.perf_counter()

    async def answer(body: bytes, record: Record) -> None:
        try:
            await _exchange(client, load, body, record, timeout)
        finally:
            slots.release()
        report(1)

    async def wait_and_answer(body: bytes, record: Record) -> None:
        await slots.acquire()
        await answer(body, record)

    async with asyncio.TaskGroup() as group:
        for index, body in enumerate(bodies):
            if arrivals is None:
                await slots.acquire()
                records.append(Record(time.perf_counter()))
                group.create_task(answer(body, records[-1]))
            else:
                due = start + arrivals[index]
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                records.append(Record(due))
                group.create_task(wait_and_answer(body, records[-1]))
    duration = time.perf_counter() - start
    return Run(records, start, duration, time.process_time() - cpu_before)


async def _exchange(client: Client, load: Load, body: bytes, record: Record, timeout: float) -> None:
    record.sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            record.finish(await client.post(load.endpoint, body, record.receive))
    except TimeoutError:
        record.fail(TimeoutError(f"no complete answer within {timeout:g} s"))
    except (OSError, BadResponse, RequestFailed) as error:
        record.fail(error)


def _place(client: Client) -> str:
    address = client.address
    return f"{address.scheme}://{address.host_header}{address.base}"
