"""A lock that is given in the order in which it was asked for."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class TurnLock:
    """Threads that step one engine take turns.

    A plain lock lets a thread that steps in a tight loop take it again before a waiting one wakes up, so that the waiting
    thread would learn of its finished sequences only at the end of the other's. Here a release hands the lock to the thread
    that has waited longest. Not re-entrant. A KeyboardInterrupt while waiting leaves the queue in order.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_held = False
        self._queue: deque[threading.Lock] = deque()

    def __enter__(self) -> TurnLock:
        with self._mutex:
            if not self._is_held:
                self._is_held = True
                return self
            ticket = threading.Lock()
            ticket.acquire()
            self._queue.append(ticket)
        try:
            ticket.acquire()
        except BaseException:
            with self._mutex:
                was_waiting = ticket in self._queue
                if was_waiting:
                    self._queue.remove(ticket)
            if not was_waiting:
                self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._release()

    def _release(self) -> None:
        with self._mutex:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._is_held = False
