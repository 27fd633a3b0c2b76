"""Runs the requests of a batch, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pace.server.batch.lines import Line
from pace.server.batch.results import Results, answered, refused

Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
"""Function of a URL's path and a body that returns a status and a body."""

GONE = 503
"""Status of a request that was not answered because the service has ended: it is no result."""


class BatchStopped(RuntimeError):
    """The service has ended. Results so far are written, and a later run continues from there."""


@dataclass
class Counts:
    """Numbers of results of one run."""

    answered: int = 0
    failed: int = 0
    """Answered with an error, or invalid."""


async def run(
    lines: Iterable[Line], answer: Answer, results: Results, max_concurrency: int, report: Callable[[int], object]
) -> Counts:
    """Answers the lines that have no result yet, at most `max_concurrency` at once, and appends each result as it
    comes. `report` is called with 1 for each. Raises BatchStopped, and errors of writing.

    A cancelled run leaves the results that it has appended."""
    counts = Counts()
    left = (line for line in lines if not results.has(line))

    async def work() -> None:
        for line in left:  # shared by all workers: each takes the next one
            if line.error is not None:
                results.append(refused(line))
                counts.failed += 1
            else:
                status, body = await answer(line.url, line.body)
                if status == GONE:
                    raise BatchStopped(body["error"]["message"])
                results.append(answered(line, status, body))
                counts.answered += status == 200
                counts.failed += status != 200
            report(1)

    workers = [asyncio.ensure_future(work()) for _ in range(max_concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return counts
