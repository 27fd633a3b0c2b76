"""A lock that is given in the order in which it was asked for."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType

_WAKE_SECONDS = 0.1
"""How often a waiting thread looks for itself, should Ctrl-C have struck between the handing over and the waking."""


class TurnLock:
    """Threads that step one engine take turns.

    A plain lock lets a thread that steps in a tight loop take it again before a waiting one wakes up, so that the
    waiting thread would learn of its finished sequences only at the end of the other's. Here a release hands the lock
    to the thread that has waited longest.

    Ctrl-C may strike between any two instructions of this file: a waiting thread leaves the queue, and a holder that
    could not release is taken to have released when the same thread asks again, as `Engine.abort` then does. Not
    re-entrant: a holder says with `is_inside` that it truly is inside, until it leaves; asking again is then a
    ValueError.

    A fork while another thread holds the lock leaves the child a free one, with `was_abandoned` set. When the
    interpreter exits, daemon threads get no more turns: one that came back from C++ to an interpreter that is gone
    would abort the process.
    """

    def __init__(self) -> None:
        self.is_inside = False
        self.was_abandoned = False
        self._forget_threads()
        _locks.add(self)

    def __enter__(self) -> TurnLock:
        me = threading.get_ident()
        while _exiting_thread not in (None, me):
            time.sleep(_EXIT_SECONDS)
        if self.is_inside and self._owner == me:
            raise ValueError(
                "the model was called from within its own step (by a logits processor, say), where it cannot run; call it after generate"
            )
        ticket = threading.Lock()
        ticket.acquire()
        try:
            with self._mutex:
                if self._owner is None or self._owner == me:
                    self._owner = me
                    return self
                self._queue.append((ticket, me))
            while self._owner != me:
                ticket.acquire(timeout=_WAKE_SECONDS)
            self._leave_queue(ticket)
        except BaseException:
            self._leave_queue(ticket)
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_inside = False
        self._release()

    def call_if_free(self, action: Callable[[], None]) -> bool:
        """Calls `action` with the lock held if nobody has it, without waiting for a turn; whether it did. A finaliser
        may ask, wherever it strikes: in the middle of a step, or of this file, of the same thread."""
        me, is_mine = threading.get_ident(), False
        try:
            if not self._mutex.locked():
                with self._mutex:
                    if self._owner is None:
                        self._owner, is_mine = me, True
                if is_mine:
                    action()
        finally:
            if is_mine:
                self._release()
        return is_mine

    def _release(self) -> None:
        """Hands over, if this thread is the owner."""
        with self._mutex:
            if self._owner != threading.get_ident():
                return
            if self._queue:
                ticket, self._owner = self._queue[0]  # who leaves the queue when awake
                ticket.release()
            else:
                self._owner = None

    def _leave_queue(self, ticket: threading.Lock) -> None:
        with self._mutex:
            self._queue = deque(entry for entry in self._queue if entry[0] is not ticket)

    def _forget_threads(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._queue: deque[tuple[threading.Lock, int]] = deque()


_EXIT_SECONDS = 5.0
"""How long the exit waits for steps that are under way."""

_exiting_thread: int | None = None


@atexit.register
def _await_steps() -> None:
    global _exiting_thread
    _exiting_thread = threading.get_ident()
    deadline = time.monotonic() + _EXIT_SECONDS
    for lock in list(_locks):
        while lock._owner not in (None, _exiting_thread) and time.monotonic() < deadline:
            time.sleep(0.001)


_locks: weakref.WeakSet[TurnLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Only the thread that forked lives on; what others held or waited for is gone."""
    for lock in _locks:
        owner = lock._owner
        lock._forget_threads()
        if owner == threading.get_ident():
            lock._owner = owner
        elif owner is not None:
            lock.was_abandoned, lock.is_inside = True, False


os.register_at_fork(after_in_child=_after_fork_in_child)
