"""A lock that is given in the order in which it was asked for."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class TurnLock:
    """Threads that step one engine take turns.

    A plain lock lets a thread that steps in a tight loop take it again before a waiting one wakes up, so that the waiting
    thread would learn of its finished sequences only at the end of the other's. Here a release hands the lock to the thread
    that has waited longest.

    Not re-entrant. Ctrl-C may strike between any two instructions of this file: a waiting thread leaves the queue, and a
    holder that could not release is taken to have released when the same thread asks again, as `Engine.abort` then does.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._queue: deque[tuple[threading.Lock, int]] = deque()

    def __enter__(self) -> TurnLock:
        me = threading.get_ident()
        ticket = threading.Lock()
        ticket.acquire()
        try:
            with self._mutex:
                if self._owner is None or self._owner == me:
                    self._owner = me
                    return self
                self._queue.append((ticket, me))
            ticket.acquire()
        except BaseException:
            with self._mutex:
                if (ticket, me) in self._queue:
                    self._queue.remove((ticket, me))
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._release()

    def _release(self) -> None:
        """Hands over, if this thread is the owner."""
        with self._mutex:
            if self._owner != threading.get_ident():
                return
            self._owner = None
            if self._queue:
                ticket, self._owner = self._queue.popleft()
                ticket.release()
