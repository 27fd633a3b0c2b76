"""Threads that wait for what the engine's thread brings about."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class Waiters:
    """Wakes whoever waits, without ever waiting for one of them: `wake` takes no lock that a waiting thread could hold."""

    def __init__(self) -> None:
        self._asleep: deque[Any] = deque()

    def wake(self) -> None:
        """Has everyone who waits look again."""
        while self._asleep:
            try:
                self._asleep.popleft().release()
            except IndexError:  # another thread was faster
                return

    def wait_for(self, condition: Callable[[], bool], deadline: float | None = None) -> bool:
        """Returns once `condition()` holds, True, or once `time.perf_counter()` has passed `deadline`, False. Whoever
        makes it hold calls `wake` afterwards. Ctrl-C interrupts it."""
        while not condition():
            alarm = threading.Lock()
            alarm.acquire()
            self._asleep.append(alarm)
            if condition():
                return True
            left = -1 if deadline is None else deadline - time.perf_counter()
            if deadline is not None and left <= 0:
                return False
            alarm.acquire(timeout=min(left, threading.TIMEOUT_MAX))
        return True
