"""Lets threads wait for the engine's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LEAST_SECONDS = 0.008
"""Minimum time between two wake-ups of a thread for tokens. A small model makes two dozen tokens in this time, and a
wake-up for each would slow it by a third (benchmarks/RESULTS.md). A delay of a hundredth of a second in text is
invisible."""


class Waiters:
    """Wakes waiting threads; never blocks: `wake` takes no lock that a waiting thread could hold.

    A thread that was just woken is left asleep for LEAST_SECONDS, so that fast tokens arrive in batches. Only
    `wake_at_once` wakes it earlier. Slow tokens, the first one and the end arrive at once.
    """

    def __init__(self) -> None:
        self._asleep: deque[Any] = deque()
        self._at_rest: deque[Any] = deque()
        self._last_woken = 0.0

    def wake(self) -> None:
        """Wakes all waiting threads that are not resting, to check their conditions."""
        _release_all(self._asleep)

    def wake_at_once(self) -> None:
        """Wakes all waiting threads, including resting ones."""
        _release_all(self._asleep)
        _release_all(self._at_rest)

    def wait_for(self, condition: Callable[[], bool], deadline: float | None = None) -> bool:
        """Returns True once `condition()` holds, or False once `time.perf_counter()` has passed `deadline`. The thread
        that makes it hold must call `wake` afterwards. Ctrl-C interrupts it."""
        if condition():
            return True
        rest = self._last_woken + LEAST_SECONDS - time.perf_counter()
        if rest > 0 and deadline is None:
            self._sleep(self._at_rest, condition, rest)
        while not condition():
            left = -1 if deadline is None else deadline - time.perf_counter()
            if deadline is not None and left <= 0:
                return False
            self._sleep(self._asleep, condition, min(left, threading.TIMEOUT_MAX))
            self._last_woken = time.perf_counter()
        return True

    def _sleep(self, beside: deque[Any], condition: Callable[[], bool], seconds: float) -> None:
        """Sleeps until woken, or for `seconds`; -1 means no limit. The alarm is queued before the condition is checked,
        so no wake-up is missed."""
        alarm = threading.Lock()
        alarm.acquire()
        beside.append(alarm)
        try:
            if not condition():
                alarm.acquire(timeout=seconds)
        finally:
            with suppress(ValueError):  # the thread that released it has removed it
                beside.remove(alarm)


def _release_all(alarms: deque[Any]) -> None:
    while alarms:
        try:
            alarms.popleft().release()
        except IndexError:  # another thread was faster
            return
