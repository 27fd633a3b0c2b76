"""Event loops that wait for what the engine's thread brings about.

After a step a loop is woken once, whatever is new for it, and then at most every REST_SECONDS: a small model makes dozens
of tokens in that time.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

REST_SECONDS = 0.008
"""As `waiting.py` has it, for the same reason."""
REST_SECONDS_PER_READER = 0.0003
"""More of it with more readers: of a small model, whose steps are shorter than that, 64 streams then cost the engine less
(benchmarks/serving.py)."""


class Reader(Protocol):
    """Something on the loop that is told when there is news for it."""

    is_dirty: bool
    """Kept by `Wakeups`; False at first."""

    def changed(self) -> None:
        """Called on the loop."""
        ...


class Wakeups:
    """Wakes one loop for readers that have news. `notify` is called on the engine's thread, and never waits.

    Between two times the loop rests from tokens, but not from what is urgent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._dirty: deque[Reader] = deque()
        self._is_called = False
        self._rests = False

    @classmethod
    def of_running_loop(cls) -> Wakeups:
        """Those of the running loop, the same for all that ask."""
        loop = asyncio.get_running_loop()
        return _of_loops.setdefault(loop, cls(loop))

    def notify(self, reader: Reader, is_urgent: bool) -> None:
        """Has `reader.changed` called on the loop: soon, or after the rest."""
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
        except RuntimeError:  # the loop is closed: nobody reads any more
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
        if self._dirty:  # looked at after the flag: `notify` looks at the flag after it has added a reader
            self._deliver()


_of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Wakeups] = weakref.WeakKeyDictionary()


class News:
    """A task of the running loop that waits for news, told of them on the engine's thread."""

    def __init__(self) -> None:
        self.is_dirty = False
        self._wakeups = Wakeups.of_running_loop()
        self._future: asyncio.Future[None] | None = None

    def tell(self, is_urgent: bool) -> None:
        """Has the task look again. Called on the engine's thread."""
        self._wakeups.notify(self, is_urgent)

    def changed(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns once `condition()` holds. Whoever makes it hold calls `tell` afterwards."""
        while not condition():
            self._future = asyncio.get_running_loop().create_future()
            await self._future
