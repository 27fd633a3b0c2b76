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
SLICE_READERS = 16
"""Maximum number of readers that one pass of a loop wakes for more tokens. With 64 streams that is about 2 ms of
work."""
READERS_PER_TURN = 4
"""Readers that a new request counts for, and also a first token or an end: they take several times as long."""
GAP_PASSES = 5
"""Passes of a loop between two slices. A request on a new connection takes five passes from its acceptance to a short
answer, so it waits for one slice at most."""


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
        """True while the loop's waker is to wake it."""
        self._on_change = on_change
        self._waker = _LoopWaker.of_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._is_late = False
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def notify(self, is_urgent: bool) -> None:
        self._waker.notify(self, is_urgent)

    def wake(self) -> None:
        """Wakes the task; called on the loop. Events that come later queue it again."""
        self.is_queued = False
        if self._on_change is not None:
            self._on_change()
        self._end_wait()

    async def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Returns True once `condition()` holds, or False after `seconds`. The code that makes it hold must call
        `notify` afterwards. Runs for every chunk of every stream, hence a bare future, and one timer for many waits:
        `close` ends it."""
        loop = asyncio.get_running_loop()
        self._is_late = False
        if seconds is not None:
            self._set_deadline(loop.time() + seconds)
        try:
            while not (is_met := condition()) and not self._is_late:
                self._future = loop.create_future()
                await self._future
            return is_met
        finally:
            self._deadline = math.inf
            self._future = None  # it holds the loop, whose waker may hold this notifier

    def close(self) -> None:
        """Frees the timer. Harmless if there is none."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._timer is None or self._timer.when() > deadline:
            self.close()
            self._timer = asyncio.get_running_loop().call_at(deadline, self._check_time)

    def _check_time(self) -> None:
        """Called at the deadline of a wait that may have ended since: then another wait may have a later one."""
        timer, self._timer = self._timer, None
        if self._deadline <= timer.when():
            self._time_out()
        elif self._deadline < math.inf:
            self._set_deadline(self._deadline)

    def _time_out(self) -> None:
        self._is_late = True
        self._end_wait()

    def _end_wait(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


async def turn() -> None:
    """Returns when the running loop has room for work of about a millisecond, such as a new request. If many tasks ask
    in the same pass of the loop, the first ones go on at once. The others follow in order, a few in each slice."""
    await _LoopWaker.of_running_loop().slices.turn()


class _LoopWaker:
    """Wakes one loop for its notifiers: once after a step for all of them, then only those with urgent events until it
    has rested."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self.slices = _Slices(self._loop)
        self._queue: deque[LoopNotifier] = deque()
        """Notifiers to wake after the rest. One that an urgent event wakes earlier stays in it, and is skipped."""
        self._urgent: deque[LoopNotifier] = deque()
        self._is_called = False
        self._rests = False

    @classmethod
    def of_running_loop(cls) -> _LoopWaker:
        loop = asyncio.get_running_loop()
        found = _wakers.get(loop)
        return _wakers.setdefault(loop, cls(loop)) if found is None else found

    def notify(self, notifier: LoopNotifier, is_urgent: bool) -> None:
        """Schedules a call of `notifier.wake`: soon, or after the rest. Called on the engine's thread."""
        if not notifier.is_queued:
            notifier.is_queued = True
            self._queue.append(notifier)
        if is_urgent:
            self._urgent.append(notifier)
        elif self._rests:
            return
        loop = self._loop()
        if self._is_called or loop is None:
            return
        self._is_called = True
        with suppress(RuntimeError):  # the loop is closed: there are no readers any more
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_called = False
        _move(self._urgent, self.slices.first)
        if not self._rests:
            self._rests = True
            rest = REST_SECONDS + REST_SECONDS_PER_READER * len(self._queue)
            self._loop().call_later(rest, self._end_rest)
            _move(self._queue, self.slices.others)
        self.slices.run()

    def _end_rest(self) -> None:
        self._rests = False
        if self._queue:  # checked after the flag: `notify` checks the flag after it has queued a notifier
            self._wake()


class _Waiter(Protocol):
    """What slices wake: a notifier, or a turn."""

    is_queued: bool
    """False if there is no reason any more to wake it."""

    def wake(self) -> None: ...


class _Slices:
    """Spreads the work that wakes cause over the passes of a loop. One pass wakes a slice of those that wait. In the
    next GAP_PASSES the loop does everything else that is due: new connections, probes, short requests.

    Each slice has room for both kinds, so neither starves."""

    def __init__(self, loop: weakref.ref[asyncio.AbstractEventLoop]) -> None:
        self._loop = loop
        self.first: deque[_Waiter] = deque()
        """New requests, first tokens and ends. Each takes the room of READERS_PER_TURN."""
        self.others: deque[_Waiter] = deque()
        """Readers of more tokens."""
        self._room = SLICE_READERS
        """Readers that the current slice still has room for; less than 1 if it is full."""
        self._is_called = False

    async def turn(self) -> None:
        turn = _Turn(asyncio.get_running_loop())
        self.first.append(turn)
        self.run()
        try:
            await turn.future
        finally:
            turn.future = None  # it holds the loop, whose slices may hold this turn

    def run(self) -> None:
        """Wakes those that the current slice has room for."""
        if not self._is_called and (self.first or self.others):
            self._is_called = True
            self._loop().call_soon(self._pass, GAP_PASSES)
        while self._room > 0 and (self.first or self.others):
            is_first = self.first and (self._room > READERS_PER_TURN or not self.others)
            waiter = (self.first if is_first else self.others).popleft()
            if waiter.is_queued:
                self._room -= READERS_PER_TURN if is_first else 1
                waiter.wake()

    def _pass(self, num_left: int) -> None:
        """Begins a new slice, after `num_left` more passes if any are waiting for it."""
        if num_left and (self.first or self.others):
            self._loop().call_soon(self._pass, num_left - 1)
            return
        self._is_called = False
        self._room = SLICE_READERS
        self.run()


class _Turn:
    """A task that waits for its turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[None] | None = loop.create_future()

    @property
    def is_queued(self) -> bool:
        """False if it has its turn, or was cancelled."""
        return self.future is not None and not self.future.done()

    def wake(self) -> None:
        self.future.set_result(None)


def _move(source: deque[Any], target: deque[Any]) -> None:
    """Moves what is in `source` now; another thread may append to it meanwhile."""
    for _ in range(len(source)):
        target.append(source.popleft())


_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker] = weakref.WeakKeyDictionary()
