"""Waits and limits that a busy machine does not break.

A wait ends when its event happens, so its limit only delays a test that fails. A limit on cost counts processor time,
which other processes change little. Whether something waits for something else is tested with a gate, not with a
clock."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = 200.0
"""Seconds after which a wait fails: less than pytest's limit for a test, so that the wait says what did not come. On
two cores at a load of 15, what takes 20 s on a free machine ends before."""


def wait_until(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Waits until `condition()` is true, and raises AssertionError if that takes more than `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.002)


async def until(condition: Callable[[], Any]) -> None:
    """Like `wait_until`, while the event loop goes on."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {PATIENCE:g} s"
        await asyncio.sleep(0.001)


class Gate:
    """Holds every thread that calls it until it is opened. It takes any arguments, so that it can be a hook."""

    def __init__(self) -> None:
        self.is_inside, self.is_open = threading.Event(), threading.Event()

    def __call__(self, *arguments: object) -> None:
        self.is_inside.set()
        assert self.is_open.wait(PATIENCE), "nobody has opened the gate"

    def wait_inside(self) -> None:
        """Waits until a thread is held."""
        assert self.is_inside.wait(PATIENCE), "no thread came to the gate"

    def open(self) -> None:
        self.is_open.set()


@contextlib.contextmanager
def cpu_limit(seconds: float, about: object = "") -> Iterator[None]:
    """Fails if the block takes `seconds` or more of this process's processor time."""
    began = time.process_time()
    yield
    spent = time.process_time() - began
    assert spent < seconds, f"{spent:.2f} s of processor time, of at most {seconds:g} s: {about}"
