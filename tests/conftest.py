"""pytest settings for all tests, with one torch thread in every process.

The tensors are tiny, so a second thread costs more than it gains. If two processes share two cores, it costs several
times as much, because torch's threads spin while they wait. A calibration took 79 s of processor time, and 11 s with
one thread."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import zlib
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start, and for torch here, which reads it on import

os.environ["PACE_CACHE_SIZE"] = "0"  # no test reads what another test or a user left in ~/.cache/pace

import pytest

pytest_plugins = ["tests.plugins.tiers", "tests.plugins.alone", "tests.plugins.durations"]

# Bytecode is cached, for the tests and the processes that they start. If the environment disables that, each process
# compiles pace again, and pytest rewrites the asserts of all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A process that a shell starts in the background ignores Ctrl-C, and so would the processes that tests interrupt.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keeps the objects that test collection creates out of garbage collection, during collection and afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Resets torch to one thread before each test, and random numbers to those of the test. They do not depend on what
    ran before."""
    import torch

    torch.set_num_threads(1)
    seed = zlib.crc32(item.nodeid.encode())
    torch.manual_seed(seed)
    random.seed(seed)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Restores the log handlers: `pace.cli.main` logs to the current stderr, which pytest closes when the test ends."""
    logger = logging.getLogger("pace")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the machine's limits quickly: with a small buffer, for a hundredth of a second."""
    from pace.bench import limits

    measure = limits.measure
    monkeypatch.setattr(limits, "BUFFER_BYTES", 4 << 20)
    monkeypatch.setattr(limits, "measure", lambda seconds=0.0: measure(0.01))


@pytest.fixture
def restore_isa_and_threads() -> Iterator[None]:
    """Restores the kernels' instruction set and number of threads after each test."""
    from pace import _C

    isa, threads = _C.isa(), _C.get_num_threads()
    yield
    _C.select_isa(isa)
    _C.set_num_threads(threads)
