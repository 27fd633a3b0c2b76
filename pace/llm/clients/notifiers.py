"""Notifiers: wake threads and tasks of event loops for events from the engine's thread."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

REST_SECONDS = 0.008
"""Minimum time between two wake-ups of a thread or loop for tokens. A small model makes two dozen tokens in this time,
and a wake-up for each would slow it by a third (benchmarks/RESULTS.md). A delay of a hundredth of a second in text is
invisible."""
REST_SECONDS_PER_READER = 0.0003
"""Additional time for each reader of a loop. With a small model, whose steps are shorter than that, 64 streams then
cost the engine less (benchmarks/serving.py)."""


class Notifier(Protocol):
    """Wakes readers."""

    def notify(self, is_urgent: bool) -> None:
        """Wakes the waiting readers to check their conditions. Never blocks. A reader that was just woken rests for
        REST_SECONDS, so that fast tokens arrive in batches; only an urgent event wakes it earlier."""
        ...


class ThreadNotifier:
    """Lets any number of threads wait. `notify` takes no lock that a waiting thread could hold."""

    def __init__(self) -> None:
        self._asleep: deque[Any] = deque()
        self._at_rest: deque[Any] = deque()
        self._last_woken = -math.inf

    def notify(self, is_urgent: bool) -> None:
        _release_all(self._asleep)
        if is_urgent:
            _release_all(self._at_rest)

    def wait_for(self, condition: Callable[[], bool], deadline: float | None = None) -> bool:
        """Returns True once `condition()` holds, or False once `time.perf_counter()` has passed `deadline`. The thread
        that makes it hold must call `notify` afterwards. Ctrl-C interrupts it."""
        if condition():
            return True
        rest = self._last_woken + REST_SECONDS - time.perf_counter()
        if rest > 0 and deadline is None:
            self._sleep(self._at_rest, condition, rest)
        while not condition():
            left = -1 if deadline is None else deadline - time.perf_counter()
            if deadline is not None and left <= 0:
                return False
            self._sleep(self._asleep, condition, min(left, threading.TIMEOUT_MAX))
            self._last_woken = time.perf_counter()
        return True

    def _sleep(self, alarms: deque[Any], condition: Callable[[], bool], seconds: float) -> None:
        """Sleeps until woken, or for `seconds`; -1 means no limit. The alarm is queued before the condition is checked,
        so no wake-up is missed."""
        alarm = threading.Lock()
        alarm.acquire()
        alarms.append(alarm)
        try:
            if not condition():
                alarm.acquire(timeout=seconds)
        finally:
            with suppress(ValueError):  # the thread that released it has removed it
                alarms.remove(alarm)


def _release_all(alarms: deque[Any]) -> None:
    while alarms:
        try:
            alarms.popleft().release()
        except IndexError:  # another thread was faster
            return


class LoopNotifier:
    """Lets one task of the running loop wait."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        """`on_change` is called on the loop after events, even while no task waits."""
        self.is_queued = False
        """True while the loop's waker holds it."""
        self._on_change = on_change
        self._waker = _LoopWaker.of_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._is_late = False

    def notify(self, is_urgent: bool) -> None:
        self._waker.notify(self, is_urgent)

    def wake(self) -> None:
        """Wakes the task; called on the loop."""
        if self._on_change is not None:
            self._on_change()
        self._end_wait()

    async def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Returns True once `condition()` holds, or False after `seconds`. The code that makes it hold must call
        `notify` afterwards. Runs for every chunk of every stream, hence a bare future and a timer."""
        loop = asyncio.get_running_loop()
        timer = None if seconds is None else loop.call_later(seconds, self._time_out)
        self._is_late = False
        try:
            while not (is_met := condition()) and not self._is_late:
                self._future = loop.create_future()
                await self._future
            return is_met
        finally:
            if timer is not None:
                timer.cancel()

    def _time_out(self) -> None:
        self._is_late = True
        self._end_wait()

    def _end_wait(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class _LoopWaker:
    """Wakes one loop for its notifiers: once after a step for all of them, then only for urgent events until it has
    rested."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._queue: deque[LoopNotifier] = deque()
        self._is_called = False
        self._rests = False

    @classmethod
    def of_running_loop(cls) -> _LoopWaker:
        loop = asyncio.get_running_loop()
        return _wakers.setdefault(loop, cls(loop))

    def notify(self, notifier: LoopNotifier, is_urgent: bool) -> None:
        """Schedules a call of `notifier.wake`: soon, or after the rest. Called on the engine's thread."""
        if not notifier.is_queued:
            notifier.is_queued = True
            self._queue.append(notifier)
        if self._is_called or (self._rests and not is_urgent):
            return
        loop = self._loop()
        if loop is None:
            return
        self._is_called = True
        with suppress(RuntimeError):  # the loop is closed: there are no readers any more
            loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        self._is_called = False
        rest = REST_SECONDS + REST_SECONDS_PER_READER * len(self._queue)
        while self._queue:
            notifier = self._queue.popleft()
            notifier.is_queued = False
            notifier.wake()
        if not self._rests:
            self._rests = True
            self._loop().call_later(rest, self._end_rest)

    def _end_rest(self) -> None:
        self._rests = False
        if self._queue:  # checked after the flag: `notify` checks the flag after it has queued a notifier
            self._wake_all()


_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker] = weakref.WeakKeyDictionary()
