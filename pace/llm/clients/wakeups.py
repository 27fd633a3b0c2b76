"""Lets event loops wait for the engine's thread.

A loop is woken once after a step for all events, then at most every REST_SECONDS. A small model makes dozens of tokens
in that time.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

REST_SECONDS = 0.008
"""Minimum time between two wake-ups, for the reason given in `waiting.py`."""
REST_SECONDS_PER_READER = 0.0003
"""Additional time for each reader. With a small model, whose steps are shorter than that, 64 streams then cost the
engine less (benchmarks/serving.py)."""


class Reader(Protocol):
    """Object on the loop that is notified of events."""

    is_dirty: bool
    """Set by `Wakeups`; False at first."""

    def changed(self) -> None:
        """Called on the loop."""
        ...


class Wakeups:
    """Wakes one loop for readers with new events. `notify` is called on the engine's thread, and never waits.

    Between two wake-ups the loop rests: only urgent events wake it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._dirty: deque[Reader] = deque()
        self._is_called = False
        self._rests = False

    @classmethod
    def of_running_loop(cls) -> Wakeups:
        """Returns the instance of the running loop, shared by all callers."""
        loop = asyncio.get_running_loop()
        return _of_loops.setdefault(loop, cls(loop))

    def notify(self, reader: Reader, is_urgent: bool) -> None:
        """Schedules a call of `reader.changed` on the loop: soon, or after the rest."""
        if not reader.is_dirty:
            reader.is_dirty = True
            self._dirty.append(reader)
        if self._is_called or (self._rests and not is_urgent):
            return
        loop = self._loop()
        if loop is None:
            return
        self._is_called = True
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: there are no readers any more
            pass

    def _deliver(self) -> None:
        self._is_called = False
        rest = REST_SECONDS + REST_SECONDS_PER_READER * len(self._dirty)
        while self._dirty:
            reader = self._dirty.popleft()
            reader.is_dirty = False
            reader.changed()
        if not self._rests:
            self._rests = True
            self._loop().call_later(rest, self._end_rest)

    def _end_rest(self) -> None:
        self._rests = False
        if self._dirty:  # checked after the flag: `notify` checks the flag after it has added a reader
            self._deliver()


_of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Wakeups] = weakref.WeakKeyDictionary()


class News:
    """Lets a task of the running loop wait for events from the engine's thread."""

    def __init__(self) -> None:
        self.is_dirty = False
        self._wakeups = Wakeups.of_running_loop()
        self._future: asyncio.Future[None] | None = None

    def tell(self, is_urgent: bool) -> None:
        """Wakes the task to check its condition. Called on the engine's thread."""
        self._wakeups.notify(self, is_urgent)

    def changed(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns once `condition()` holds. The code that makes it hold must call `tell` afterwards."""
        while not condition():
            self._future = asyncio.get_running_loop().create_future()
            await self._future
