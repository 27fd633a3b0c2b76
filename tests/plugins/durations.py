"""How long tests take: the slowest files start first, and every whole run saves its seconds for `make durations`.

`python -m tests.plugins.durations` turns the last run into tests/durations.json, which orders the files, and
tests/durations.md, for people to read. It keeps one line about `make test-all`. tests/budgets.toml has the maximum
seconds of each room."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.tiers import ROOT, commit

LAST_RUN = ROOT / "build" / "test-durations.json"
KEPT = ROOT / "tests" / "durations.json"
PAGE = ROOT / "tests" / "durations.md"
SLOWEST = 20


def room(path: str) -> str:
    """Folder below tests/ that has a budget: one level, or two within tests/llm; "tests" for files at the top."""
    parts = Path(path).parts[1:-1]
    return "/".join(parts[: 2 if parts[:1] == ("llm",) else 1]) or "tests"


# -- in a run ----------------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts files by falling seconds, the order of `--dist loadfile`, and keeps the order within each file."""
    seconds = json.loads(KEPT.read_text())["files"] if KEPT.exists() else {}
    unknown = sorted(seconds.values())[len(seconds) // 2] if seconds else 0.0
    items.sort(key=lambda item: -seconds.get(item.nodeid.split("::")[0], unknown))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config))


class Recorder:
    """Seconds of each test in this run, including set-up and teardown."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: Counter[str] = Counter()
        self.begin = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        is_whole = not self.config.option.keyword and not self.config.option.markexpr
        if exitstatus or not is_whole or self.config.args != self.config.getini("testpaths"):
            return
        LAST_RUN.parent.mkdir(exist_ok=True)
        LAST_RUN.write_text(
            json.dumps(
                {
                    "tier": self.config.getoption("tier"),
                    "commit": commit()[0],
                    "date": datetime.now(UTC).date().isoformat(),
                    "machine": f"{os.cpu_count()} CPUs, {cpu_name()}",
                    "seconds": round(time.monotonic() - self.begin),
                    "counts": self.counts(),
                    "tests": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
                }
            )
        )

    def counts(self) -> dict[str, int]:
        """Numbers of tests by outcome."""
        stats = self.config.pluginmanager.get_plugin("terminalreporter").stats
        return {outcome: len(stats[outcome]) for outcome in ("passed", "skipped", "xfailed") if stats.get(outcome)}


def cpu_name() -> str:
    from pace import _C

    return f"{_C.cpu_info()['model_name'].strip() or platform.machine()}, {_C.best_isa()}"


# -- afterwards --------------------------------------------------------------------------------------------------------


def summary(run: dict[str, Any], last: dict[str, Any] | None) -> dict[str, Any]:
    """Summary of a run of `make test`: seconds by file, the slowest tests, and the `last` run's seconds by room. The
    same run again has the same summary."""
    files: Counter[str] = Counter()
    for name, seconds in run["tests"].items():
        files[name.split("::")[0]] += seconds
    about = {key: run[key] for key in ("commit", "date", "machine", "seconds")}
    slowest = Counter(run["tests"]).most_common(SLOWEST)
    is_again = last is not None and all(last.get(key) == value for key, value in about.items())
    before = last["before"] if is_again else by_room(last) if last else {}
    return {
        **about,
        "num_tests": len(run["tests"]),
        "slowest": {name: round(seconds, 1) for name, seconds in slowest},
        "before": before,
        "test_all": last["test_all"] if last else "",
        "files": {path: round(seconds, 1) for path, seconds in sorted(files.items())},
    }


def by_room(kept: dict[str, Any]) -> dict[str, float]:
    rooms: dict[str, float] = defaultdict(float)
    for path, seconds in kept["files"].items():
        rooms[room(path)] += seconds
    return dict(sorted(rooms.items(), key=lambda item: -item[1]))


def page(kept: dict[str, Any]) -> str:
    """Text of tests/durations.md: a run of `make test`, the one before it, and the last run of `make test-all`."""
    rooms, before = (rooms | {"all": sum(rooms.values())} for rooms in (by_room(kept), kept["before"]))

    def row(name: str, seconds: float) -> str:
        earlier = f" {before[name]:.0f}" if before.get(name) else ""
        return f"| {name} | {seconds:.0f} |{earlier} |"

    slowest = [f"| `{name.replace('|', '_')}` | {seconds:.1f} |" for name, seconds in kept["slowest"].items()]
    return "\n".join(
        [
            "# How long the tests take",
            "",
            (
                f"`make test` at {kept['commit']} on {kept['date']}: {kept['num_tests']:,} tests in {kept['seconds']} "
                f"s, on"
            ),
            f"{kept['machine']}. Seconds are of all workers together.",
            "",
            kept["test_all"],
            "",
            "`make durations` writes this page from the last whole `make test`. A folder that takes more than",
            "[budgets.toml](budgets.toml) allows fails `make check`.",
            "",
            "| folder | seconds | before |",
            "|---|---|---|",
            *(row(name, seconds) for name, seconds in rooms.items()),
            "",
            "The slowest tests:",
            "",
            "| test | seconds |",
            "|---|---|",
            *slowest,
            "",
        ]
    )


def line_of_all(run: dict[str, Any]) -> str:
    """Line of the page about a run of `make test-all`."""
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in run["counts"].items())
    return (
        f"`make test-all` at {run['commit']} on {run['date']}: {counts} in {run['seconds']:,} s, on {run['machine']}."
    )


def main() -> int:
    if not LAST_RUN.exists():
        print("no whole run of make test has ended well in this tree yet", file=sys.stderr)
        return 1
    run = json.loads(LAST_RUN.read_text())
    last = json.loads(KEPT.read_text()) if KEPT.exists() else None
    if run["tier"] == "all":
        if last is None:
            print("seconds of make test come first", file=sys.stderr)
            return 1
        kept = last | {"test_all": line_of_all(run)}
    else:
        kept = summary(run, last)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
