"""Turns of several engines, which share the kernel threads of a process."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext

NO_TURNS: AbstractContextManager[None] = nullcontext()
"""The turns of an engine that steps whenever it likes."""


class StepTurns:
    """A fair lock: the thread that has waited longest is next. A driver holds it for one step of its engine.

    Each engine waits for at most one step of every other. Without it, two engines compete for the kernel threads
    several times a step, and nothing says who wins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()
        """A held lock for each waiting thread; its release is the thread's turn."""

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
