"""Tests marked `alone` measure time, memory or the progress of a thread: while one runs, no other test of this tree does.

Every worker holds a shared lock during a test, and an exclusive one during a test that is alone. A worker that wants
its test alone first closes the gate, so that the others cannot overtake it."""

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
    """Whose turn it is, among all processes that were given the same folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.gate, self.floor = folder / "gate", folder / "floor"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        alone = item.get_closest_marker("alone") is not None
        with locked(self.gate, fcntl.LOCK_EX) as gate, locked(self.floor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            if not alone:
                fcntl.flock(gate, fcntl.LOCK_UN)
            return (yield)


@contextlib.contextmanager
def locked(path: Path, how: int) -> Iterator[int]:
    """A lock that ends with this process, whatever ends it. Processes that a test starts do not inherit it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)
