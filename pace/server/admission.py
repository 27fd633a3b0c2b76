"""Who may wait, and for how long: a queue with a bound, and an estimate for those who are turned away."""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from pace.llm.engine.scheduler import HEAD_START
from pace.server.errors import ApiError
from pace.server.limits import Limits

SMOOTHING = 0.2
"""Weight of the newest measurement of how fast prompts are read."""
ROW_SMOOTHING = 0.02
"""Of how fast rows leave: they leave many at once, and then none for long."""


@dataclass(order=True)
class Waiting:
    """One request's turn, in the order of the engine's scheduler."""

    place: tuple[int, int]
    num_rows: int = field(compare=False)
    num_tokens: int = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class Admission:
    """Lets requests to the engine in order, no more rows than keep it busy. On the event loop alone."""

    def __init__(self, limits: Limits, max_sequences: int, rejected: Callable[[str], object]) -> None:
        """`max_sequences` run at once; as many again wait in the engine, the others here. `rejected` hears of each
        request that is turned away, and why: "queue", "key" or "wait"."""
        self._max_rows = 2 * max_sequences
        self._max_requests = (4 * max_sequences if limits.max_queue is None else limits.max_queue) + max_sequences
        self._max_wait = limits.max_wait
        self._max_per_key = limits.max_per_key
        self._num_requests = 0
        self._per_key: Counter[str] = Counter()
        self._num_rows = 0
        self._max_sequences = max_sequences
        self._seconds_per_row: float | None = None
        self._last_leave: float | None = None
        """When a row left while others waited, on the loop's clock."""
        self._waiting: list[Waiting] = []
        self._arrivals = 0
        self._tokens_per_second: float | None = None
        self._rejected = rejected

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_requests(self) -> int:
        """In any stage."""
        return self._num_requests

    def check_room(self) -> None:
        """Raises ApiError 429 where a request that comes now would be turned away, whatever it asks for. Costs next to
        nothing, so that those who are refused take no time from those who are served."""
        if self._num_requests >= self._max_requests:
            raise self._full("queue", f"{self._num_requests} requests are under way, and no more may wait")
        if self._waiting and self.seconds_waiting > self._max_wait:
            raise self._full("wait", "those that wait already take longer than anybody may wait")

    @contextmanager
    def request(self, key: str | None) -> Iterator[None]:
        """Counts a request from its first byte to its last. Raises ApiError 429 where there are too many."""
        self.check_room()
        if key is not None and self._max_per_key is not None and self._per_key[key] >= self._max_per_key:
            raise self._full("key", f"this key has {self._max_per_key} requests under way, and may have no more")
        self._num_requests += 1
        self._per_key[key or ""] += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            self._per_key[key or ""] -= 1

    @asynccontextmanager
    async def rows(self, num_rows: int, num_tokens: int, priority: int) -> AsyncIterator[None]:
        """Waits for the turn of a request of so many rows and prompt tokens. Raises ApiError 429 where that would take
        longer than anybody may wait."""
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
        """Hears how long a prompt took to be read."""
        if num_tokens and seconds > 0:
            rate, known = num_tokens / seconds, self._tokens_per_second
            self._tokens_per_second = rate if known is None else known + SMOOTHING * (rate - known)

    @property
    def seconds_waiting(self) -> float:
        """Estimate of the time until a request that comes now begins: as long as it takes to read the prompts that wait,
        or until as many rows have left as are before it."""
        num_tokens = sum(waiting.num_tokens for waiting in self._waiting)
        num_rows = max(0, self._num_rows - self._max_sequences) + sum(waiting.num_rows for waiting in self._waiting)
        reading = num_tokens / self._tokens_per_second if self._tokens_per_second else 0.0
        return max(reading, num_rows * (self._seconds_per_row or 0.0))

    def _measure_leave(self, num_rows: int) -> None:
        """Notes how fast rows leave while others wait for their places."""
        now = asyncio.get_running_loop().time()
        if self._last_leave is not None and self._waiting:
            seconds, known = (now - self._last_leave) / num_rows, self._seconds_per_row
            self._seconds_per_row = seconds if known is None else known + ROW_SMOOTHING * (seconds - known)
        self._last_leave = now if self._waiting else None

    async def _wait(self, num_rows: int, num_tokens: int, priority: int) -> None:
        if self.seconds_waiting > self._max_wait:
            raise self._full("wait", "those that wait already take longer than anybody may wait")
        self._arrivals += 1
        turn = asyncio.get_running_loop().create_future()
        waiting = Waiting((self._arrivals - HEAD_START * priority, self._arrivals), num_rows, num_tokens, turn)
        insort(self._waiting, waiting)
        try:
            await turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self._let_in()  # its turn had come: the next one's has
            raise

    def _let_in(self) -> None:
        """Gives the first one its turn where there is room. A turn is taken in a later callback of the loop, so the rows
        that come with it are not counted yet: one turn at a time. Whoever was cancelled leaves in a later callback, too."""
        if self._num_rows < self._max_rows:
            first = next((waiting for waiting in self._waiting if not waiting.turn.done()), None)
            if first is not None:
                self._waiting.remove(first)
                first.turn.set_result(None)

    def _full(self, why: str, message: str) -> ApiError:
        self._rejected(why)
        seconds = max(1, math.ceil(self.seconds_waiting))
        return ApiError(
            429,
            f"{message}; try again in {seconds} s",
            code="rate_limit_exceeded",
            headers={"retry-after": str(seconds), "retry-after-ms": str(1000 * seconds)},
        )
