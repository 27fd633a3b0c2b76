"""One thread of torch in every process of the tests. Their tensors are tiny: a second thread costs more than it brings,
and several times as much where two processes share two cores, for torch's threads spin while they wait (a calibration:
79 s of processor time, 11 s with one)."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # of what tests start, and of torch here, which reads it when it is imported

os.environ["PACE_CACHE_SIZE"] = "0"  # no test finds what another, or a user, has left in ~/.cache/pace

import pytest

pytest_plugins = ["tests.plugins.tiers", "tests.plugins.alone", "tests.plugins.durations"]

# Bytecode is kept, of tests and of what they start. Where the environment forbids it, each process compiles pace anew, and
# pytest rewrites the asserts of all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What a shell starts in the background ignores Ctrl-C, and so would the processes that tests start and interrupt.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What collecting makes stays. The collector of garbage does not look at it, neither meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Whatever a test before has set."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """`pace.cli.main` sends the log to the stderr that it finds, which pytest closes when the test ends."""
    logger = logging.getLogger("pace")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's limits are measured for a moment: `pace plan` takes a second for them."""
    from pace.bench import limits

    measure = limits.measure
    monkeypatch.setattr(limits, "measure", lambda seconds=0.0: measure(0.02))


@pytest.fixture
def restore_isa_and_threads() -> Iterator[None]:
    """The kernels' instruction set and threads as they were."""
    from pace import _C

    isa, threads = _C.isa(), _C.get_num_threads()
    yield
    _C.select_isa(isa)
    _C.set_num_threads(threads)
