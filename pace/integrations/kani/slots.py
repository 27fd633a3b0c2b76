"""Limits the number of concurrent answers across event loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator


class Slots:
    """A fair semaphore that outlives event loops and may be shared by several."""

    def __init__(self, number: int | None) -> None:
        """`number`: None for no limit."""
        self._num_free = float("inf") if number is None else number
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Waits for a slot, and holds it during the block."""
        await self._take()
        try:
            yield
        finally:
            self._give()

    async def _take(self) -> None:
        with self._lock:
            if self._num_free > 0:
                self._num_free -= 1
                return
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                was_given = turn not in self._waiting
                if not was_given:
                    self._waiting.remove(turn)
            if was_given:
                self._give()
            raise

    def _give(self) -> None:
        """Passes the slot to the longest waiting task, if there is one."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(_end, turn)
                    return
                except RuntimeError:  # its loop is closed
                    pass
            self._num_free += 1


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
