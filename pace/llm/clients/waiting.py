"""Threads that wait for what the engine's thread brings about."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LEAST_SECONDS = 0.008
"""Between two times that a thread is woken for a token. A small model makes two dozen tokens in this time, and waking
someone for each would slow it by a third (benchmarks/RESULTS.md). Nobody sees a text come by the hundredth of a
second."""


class Waiters:
    """Wakes whoever waits, without ever waiting for one of them: `wake` takes no lock that a waiting thread could hold.

    Who is woken and soon waits again rests: nothing but `wake_at_once` wakes it until LEAST_SECONDS have passed. So
    tokens that come fast are taken by the handful, and slow ones, the first one and the end at once.
    """

    def __init__(self) -> None:
        self._asleep: deque[Any] = deque()
        self._at_rest: deque[Any] = deque()
        self._last_woken = 0.0

    def wake(self) -> None:
        """Has everyone who waits, and does not rest, look again."""
        _release_all(self._asleep)

    def wake_at_once(self) -> None:
        """Has everyone look again."""
        _release_all(self._asleep)
        _release_all(self._at_rest)

    def wait_for(self, condition: Callable[[], bool], deadline: float | None = None) -> bool:
        """Returns once `condition()` holds, True, or once `time.perf_counter()` has passed `deadline`, False. Whoever
        makes it hold calls `wake` afterwards. Ctrl-C interrupts it."""
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
        """Until woken, or for so long; -1 has no end. Whoever makes the condition hold after it was looked at here finds
        the alarm."""
        alarm = threading.Lock()
        alarm.acquire()
        beside.append(alarm)
        try:
            if not condition():
                alarm.acquire(timeout=seconds)
        finally:
            with suppress(ValueError):  # whoever released it has taken it out
                beside.remove(alarm)


def _release_all(alarms: deque[Any]) -> None:
    while alarms:
        try:
            alarms.popleft().release()
        except IndexError:  # another thread was faster
            return
