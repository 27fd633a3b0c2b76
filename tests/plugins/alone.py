"""Tests marked `alone` measure time, memory or the progress of a thread: while one runs, no other test of this tree
does.

Every worker holds a shared lock during an ordinary test, and an exclusive lock during tests marked `alone`. It keeps
the exclusive lock until its next ordinary test, so that several `alone` tests in a row wait for the others once. A
worker closes the gate before it waits for the exclusive lock, so that the others cannot overtake it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.tiers import ROOT


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: no other test of this run goes on meanwhile")
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        config.pluginmanager.register(Turns(ROOT / "build" / "turns"))


class Turns:
    """Decides whose turn it is, among all processes that use the same folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.gate, self.floor = folder / "gate", folder / "floor"
        self.kept = contextlib.ExitStack()
        """Both locks, while `alone` tests follow each other."""
        self.is_kept = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
        if not is_alone(item):
            with locked(self.gate, fcntl.LOCK_EX) as gate, locked(self.floor, fcntl.LOCK_SH):
                fcntl.flock(gate, fcntl.LOCK_UN)
                return (yield)
        if not self.is_kept:
            self.kept.enter_context(locked(self.gate, fcntl.LOCK_EX))
            self.kept.enter_context(locked(self.floor, fcntl.LOCK_EX))
        self.is_kept = True
        try:
            return (yield)
        finally:
            if nextitem is None or not is_alone(nextitem):
                self.is_kept = False
                self.kept.close()


def is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@contextlib.contextmanager
def locked(path: Path, how: int) -> Iterator[int]:
    """Holds a lock on a file. It ends with this process, even if that is killed. Child processes do not inherit it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)
