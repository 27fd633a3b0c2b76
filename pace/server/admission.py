"""Admission of requests: a bounded queue, and an estimate of the waiting time for requests that are refused."""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from pace.llm.engine.scheduler import ARRIVALS_PER_PRIORITY
from pace.server.errors import ApiError
from pace.server.limits import Limits

SMOOTHING = 0.2
"""Weight of the newest measurement of the prefill speed."""
ROW_SMOOTHING = 0.02
"""Weight of the newest measurement of how fast rows leave: many leave at once, and then none for a long time."""


@dataclass(order=True)
class Waiting:
    """A waiting request, in the order of the engine's scheduler."""

    sort_key: tuple[int, int]
    num_rows: int = field(compare=False)
    num_tokens: int = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class Admission:
    """Lets requests into the engine in order, with only enough rows to keep it busy. Used only on the event loop."""

    def __init__(
        self,
        limits: Limits,
        max_sequences: int,
        rejected: Callable[[str], object],
        requests_of_key: Counter[str] | None = None,
    ) -> None:
        """`max_sequences` run at once; the same number waits in the engine, the others here. `rejected` is called for
        each refused request with the reason: "queue", "key" or "wait". `requests_of_key` counts those of other models,
        too."""
        self._max_rows = 2 * max_sequences
        self._max_requests = (4 * max_sequences if limits.max_queue is None else limits.max_queue) + max_sequences
        self._max_wait = limits.max_wait
        self._max_per_key = limits.max_per_key
        self._num_requests = 0
        self._per_key = Counter() if requests_of_key is None else requests_of_key
        self._num_rows = 0
        self._max_sequences = max_sequences
        self._seconds_per_row: float | None = None
        self._last_leave: float | None = None
        """Time at which a row last left while others waited, on the loop's clock."""
        self._waiting: list[Waiting] = []
        self._arrivals = 0
        self._tokens_per_second: float | None = None
        self._rejected = rejected

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_requests(self) -> int:
        """Number of requests in any stage."""
        return self._num_requests

    def check_room(self) -> None:
        """Raises ApiError 429 if any new request would be refused now. Very cheap, so that refusals take no time from
        requests that are served."""
        if self._num_requests >= self._max_requests:
            raise self._full("queue", f"the queue is full: {self._num_requests} requests are in progress")
        if self._waiting and self.seconds_waiting > self._max_wait:
            raise self._too_long()

    @contextmanager
    def request(self, key: str | None) -> Iterator[None]:
        """Counts a request for the duration of the block. Raises ApiError 429 if there are too many."""
        self.check_room()
        if key is not None and self._max_per_key is not None and self._per_key[key] >= self._max_per_key:
            raise self._full("key", f"this key has {self._max_per_key} requests in progress, which is its maximum")
        self._num_requests += 1
        self._per_key[key or ""] += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            self._per_key[key or ""] -= 1

    @asynccontextmanager
    async def rows(self, num_rows: int, num_tokens: int, priority: int) -> AsyncIterator[None]:
        """Waits for the turn of a request with `num_rows` rows and `num_tokens` prompt tokens. Raises ApiError 429 if
        the wait would exceed the limit."""
        if self._waiting or self._num_rows >= self._max_rows:
            await self._wait(num_rows, num_tokens, priority)
        self._num_rows += num_rows
        try:
            self._let_in()
            yield
        finally:
            self._num_rows -= num_rows
            self._measure_leave(num_rows)
            self._let_in()

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Records the seconds that the prefill of a prompt took."""
        if num_tokens and seconds > 0:
            self._tokens_per_second = _smoothed(self._tokens_per_second, num_tokens / seconds, SMOOTHING)

    @property
    def seconds_waiting(self) -> float:
        """Estimated seconds until a new request begins. This is the prefill time of all waiting prompts, or the time
        until enough rows before it have left, if that is longer."""
        num_tokens = sum(waiting.num_tokens for waiting in self._waiting)
        num_rows = max(0, self._num_rows - self._max_sequences) + sum(waiting.num_rows for waiting in self._waiting)
        reading = num_tokens / self._tokens_per_second if self._tokens_per_second else 0.0
        return max(reading, num_rows * (self._seconds_per_row or 0.0))

    def _measure_leave(self, num_rows: int) -> None:
        """Records how fast rows leave while others wait for their places."""
        now = asyncio.get_running_loop().time()
        if self._last_leave is not None and self._waiting:
            seconds = (now - self._last_leave) / num_rows
            self._seconds_per_row = _smoothed(self._seconds_per_row, seconds, ROW_SMOOTHING)
        self._last_leave = now if self._waiting else None

    async def _wait(self, num_rows: int, num_tokens: int, priority: int) -> None:
        if self.seconds_waiting > self._max_wait:
            raise self._too_long()
        self._arrivals += 1
        turn = asyncio.get_running_loop().create_future()
        waiting = Waiting(
            (self._arrivals - ARRIVALS_PER_PRIORITY * priority, self._arrivals), num_rows, num_tokens, turn
        )
        insort(self._waiting, waiting)
        try:
            await turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self._let_in()  # its turn had come: pass it on
            raise

    def _let_in(self) -> None:
        """Gives the first waiting request its turn if there is room. A turn is taken in a later callback of the loop,
        so its rows are not counted yet: one turn at a time. A cancelled request also leaves in a later callback."""
        if self._num_rows < self._max_rows:
            first = next((waiting for waiting in self._waiting if not waiting.turn.done()), None)
            if first is not None:
                self._waiting.remove(first)
                first.turn.set_result(None)

    def _too_long(self) -> ApiError:
        return self._full("wait", f"the queue is too long: the estimated wait exceeds {self._max_wait:g} s")

    def _full(self, why: str, message: str) -> ApiError:
        self._rejected(why)
        seconds = max(1, math.ceil(self.seconds_waiting))
        return ApiError(
            429,
            f"{message}; try again in {seconds} s",
            code="rate_limit_exceeded",
            headers={"retry-after": str(seconds), "retry-after-ms": str(1000 * seconds)},
        )


def _smoothed(known: float | None, new: float, weight: float) -> float:
    return new if known is None else known + weight * (new - known)
