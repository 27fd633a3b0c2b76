"""Which tests a run has: `--tier test` (make test, the default) or `--tier all` (make test-all).

A test marked `thorough` runs only in `all`. Cases marked `rotates` are too many for every run. Each commit runs a
quarter of them, and four commits in a row run all of them. `sample(values, always)` marks them."""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
QUARTERS = 4


def sample(values: Sequence[Any], always: Callable[[Any], bool]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: values for which `always` is false rotate over commits."""
    return [value if always(value) else pytest.param(value, marks=pytest.mark.rotates) for value in values]


@cache
def commit() -> tuple[str, int]:
    """Short hash of the checked-out commit, and the number of commits up to it; ("none", 0) outside of git."""
    command = ["git", "-C", str(ROOT), "rev-list", "--max-count=1", "--abbrev-commit", "HEAD"]
    count = ["git", "-C", str(ROOT), "rev-list", "--count", "HEAD"]
    try:
        return tuple(
            parse(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
            for arguments, parse in ((command, str.strip), (count, int))
        )
    except (OSError, subprocess.CalledProcessError):
        return "none", 0


@cache
def quarter() -> int:
    """Quarter of the rotating cases that this commit runs, 0 to 3. PACE_TEST_QUARTER selects another quarter."""
    asked = os.environ.get("PACE_TEST_QUARTER")
    return (int(asked) if asked else commit()[1]) % QUARTERS


def quarter_of(nodeid: str) -> int:
    return zlib.crc32(nodeid.encode()) % QUARTERS


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "test: what every commit runs; all: also thorough tests and every rotating case"
    parser.addoption("--tier", choices=("test", "all"), default="test", help=help)


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "thorough: runs only in make test-all",
        "rotates: one of four commits in a row runs it; make test-all runs it always",
    ):
        config.addinivalue_line("markers", line)
    _prepare_hypothesis()


def _prepare_hypothesis() -> None:
    """Makes hypothesis's random tests differ between commits but repeat within a commit.

    Shrinking a failure takes at most a minute, so that it is shown before the test's own time limit."""
    from hypothesis import HealthCheck, core, settings
    from hypothesis.internal.conjecture import engine

    if core.global_force_seed is None:
        core.global_force_seed = commit()[1]
    slow = [HealthCheck.too_slow]  # fails only because the machine is busy
    settings.register_profile("pace", deadline=None, print_blob=True, suppress_health_check=slow)
    settings.load_profile("pace")
    engine.MAX_SHRINKING_SECONDS = 60


def pytest_report_header(config: pytest.Config) -> str:
    from hypothesis import core

    name, _ = commit()
    cases = "all cases" if config.getoption("tier") == "all" else f"quarter {quarter()} of rotating cases"
    return f"commit {name}: {cases}, --hypothesis-seed={core.global_force_seed}" + (
        f" (PACE_TEST_QUARTER={quarter()} repeats the cases)" if config.getoption("tier") == "test" else ""
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("tier") == "all":
        return

    def is_left_out(item: pytest.Item) -> bool:
        rotates = item.get_closest_marker("rotates") is not None
        return item.get_closest_marker("thorough") is not None or rotates and quarter_of(item.nodeid) != quarter()

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        items[:] = [item for item in items if not is_left_out(item)]
        config.hook.pytest_deselected(items=left_out)
