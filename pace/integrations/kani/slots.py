"""Limits the number of concurrent answers across event loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future


class Slots:
    """A fair semaphore that outlives event loops and may be shared by several."""

    def __init__(self, number: int | None) -> None:
        """`number`: None for no limit."""
        self._num_free = float("inf") if number is None else number
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Waits for a slot, and holds it during the block."""
        turn: Future[None] = Future()
        self._waiting.append(turn)
        self._give(0)
        try:
            await asyncio.wrap_future(turn)
            yield
        finally:
            if not turn.cancel():  # the slot was given, perhaps in the moment of a cancellation
                self._give(1)

    def _give(self, number: int) -> None:
        """Frees slots, and passes free ones to the tasks that have waited longest."""
        with self._lock:
            self._num_free += number
            while self._num_free and self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    self._num_free -= 1
                    turn.set_result(None)
