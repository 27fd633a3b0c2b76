"""Tools of the tests: the tests of a run, their time budgets, tests that run while no other test does, planted bugs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.planted.bugs import read_bugs
from tests.plugins import durations, tiers
from tests.plugins.alone import Turns
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
BUDGETS = ROOT / "tests" / "budgets.toml"
IDS = [f"tests/{name}/test_{name}.py::test_{kind}[{i}]" for name in "abc" for kind in ("x", "y") for i in range(40)]


def item(nodeid: str, *marks: str) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: name if name in marks else None)


def chosen(monkeypatch: pytest.MonkeyPatch, tier: str, commit: int, items: list[SimpleNamespace]) -> list[str]:
    """Items that a run of a tier selects at a commit; the others are reported as deselected."""
    monkeypatch.setenv("PACE_TEST_QUARTER", str(commit))
    tiers.quarter.cache_clear()
    kept, left_out = list(items), []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    tiers.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: tier, hook=hook), kept)
    tiers.quarter.cache_clear()
    assert {one.nodeid for one in items} == {one.nodeid for one in kept + left_out}
    assert len(items) == len(kept) + len(left_out)
    return [one.nodeid for one in kept]


def test_every_rotating_case_runs_in_one_of_four_commits(monkeypatch):
    items = [item(nodeid, "rotates") for nodeid in IDS]
    for first in (0, 1_000_003):
        runs = [chosen(monkeypatch, "test", commit, items) for commit in range(first, first + 4)]
        assert sorted(nodeid for run in runs for nodeid in run) == sorted(IDS)
        assert all(len(IDS) / 8 < len(run) < len(IDS) / 2 for run in runs), [len(run) for run in runs]
    assert {tiers.quarter_of(nodeid) for nodeid in IDS} == set(range(tiers.QUARTERS))


def test_tiers(monkeypatch):
    items = [item("plain"), item("thorough", "thorough"), *(item(nodeid, "rotates") for nodeid in IDS)]
    assert chosen(monkeypatch, "all", 0, items) == [one.nodeid for one in items]
    run = chosen(monkeypatch, "test", 0, items)
    assert run[0] == "plain" and "thorough" not in run and 1 < len(run) < len(items)


def test_what_is_not_always_there_rotates():
    plain, marked = tiers.sample(["a", "b"], always=lambda value: value == "a")
    assert plain == "a" and marked.values == ("b",) and [mark.name for mark in marked.marks] == ["rotates"]


# -- durations


def test_rooms_of_files():
    rooms = {
        "tests/test_env.py": "tests",
        "tests/ops/test_norm.py": "ops",
        "tests/ops/sampling/test_mask.py": "ops",
        "tests/llm/test_closing.py": "llm",
        "tests/llm/models/families/test_x.py": "llm/models",
    }
    assert {path: durations.room(path) for path in rooms} == rooms


def test_the_page_of_durations():
    run = {"commit": "abc", "date": "2030-01-02", "machine": "2 CPUs", "seconds": 70}
    tests = {
        "tests/ops/test_a.py::test_a": 30.04,
        "tests/ops/test_a.py::test_b[x|y]": 10.0,
        "tests/test_c.py::test_d": 5.0,
    }
    last = {"files": {"tests/ops/test_a.py": 50.0}, "test_all": "`make test-all` at abb."}
    kept = durations.summary(run | {"tests": tests, "tier": "test"}, last)
    assert kept["files"] == {"tests/ops/test_a.py": 40.0, "tests/test_c.py": 5.0} and kept["num_tests"] == 3
    assert durations.by_room(kept) == {"ops": 40.0, "tests": 5.0}
    page = durations.page(kept)
    assert "`make test` at abc on 2030-01-02: 3 tests in 70 s, on\n2 CPUs." in page
    for row in (
        last["test_all"],
        "| ops | 40 | 50 |",
        "| tests | 5 | |",
        "| all | 45 | 50 |",
        "| `tests/ops/test_a.py::test_b[x_y]` | 10.0 |",
    ):
        assert row in page
    assert durations.summary(run | {"tests": tests}, kept) == kept, "the same run again"
    assert "| ops | 40 | |" in durations.page(durations.summary(run | {"tests": tests}, None))


def test_what_is_kept_of_all_tests():
    counts = {"passed": 10_124, "skipped": 56}
    run = {"commit": "abc", "date": "2030-01-02", "machine": "2 CPUs", "seconds": 3871, "counts": counts}
    line = "`make test-all` at abc on 2030-01-02: 10,124 passed, 56 skipped in 3,871 s, on 2 CPUs."
    assert durations.line_of_all(run) == line


def over_budget(rooms: dict[str, float], budgets: dict[str, float]) -> list[str]:
    return [
        f"{room} took {seconds:.0f} s and may take {budgets.get(room, 0)}"
        for room, seconds in rooms.items()
        if seconds > budgets.get(room, 0)
    ]


def test_no_room_is_over_its_budget():
    """Seconds by room, and in total; every room with tests has a budget."""
    rooms, budgets = durations.by_room(json.loads(durations.KEPT.read_text())), tomllib.loads(BUDGETS.read_text())
    over = over_budget(rooms | {"all": sum(rooms.values())}, budgets["seconds"])
    paths = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert {*map(durations.room, paths)} <= {*budgets["seconds"]}, "tests/budgets.toml lacks a room"
    assert not over, "\n".join([*over, "make these tests cheaper, or move what is dear to make test-all"])


def test_a_room_over_its_budget_is_named():
    assert over_budget({"a": 10.0, "b": 5.0, "c": 0.5}, {"a": 9, "b": 5}) == [
        "a took 10 s and may take 9",
        "c took 0 s and may take 0",
    ]


# -- alone

PROCESS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tests.plugins.alone import Turns
item = SimpleNamespace(get_closest_marker=lambda name: sys.argv[2] if sys.argv[2] == name else None)
turn = Turns(Path(sys.argv[1])).pytest_runtest_protocol(item, None)
print("here", flush=True)
next(turn)
print("begun", flush=True)
sys.stdin.readline()
turn.close()
"""


class Worker:
    """A process with one test, which begins when its lock allows, and ends when `end` is called."""

    def __init__(self, folder: Path, kind: str) -> None:
        command = [sys.executable, "-c", PROCESS, folder, kind]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, bufsize=0)
        assert self.process.stdout.readline() == b"here\n"

    def has_begun(self, seconds: float) -> bool:
        return (
            bool(select.select([self.process.stdout], [], [], seconds)[0])
            and self.process.stdout.readline() == b"begun\n"
        )

    def end(self) -> None:
        self.process.communicate(b"\n", timeout=PATIENCE)
        assert self.process.returncode == 0


@contextlib.contextmanager
def workers(folder: Path) -> Iterator[list[Worker]]:
    started: list[Worker] = []
    try:
        yield started
    finally:
        for worker in started:
            worker.process.kill()
            worker.process.communicate()


def is_locked(path: Path, how: int = fcntl.LOCK_EX) -> bool:
    """True if the file is locked against an exclusive lock or, with LOCK_SH, a shared one."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_test_that_is_alone_waits_for_others_and_is_not_overtaken(tmp_path):
    """Each wait is observed for a fifth of a second. A missing wait may be noticed late; a correct one never fails."""
    with workers(tmp_path) as started:

        def start(kind: str) -> Worker:
            started.append(Worker(tmp_path, kind))
            return started[-1]

        first, second = start("shared"), start("shared")
        assert first.has_begun(PATIENCE) and second.has_begun(PATIENCE), "tests that share the machine run at once"
        alone = start("alone")
        wait_until(lambda: is_locked(tmp_path / "gate"))
        late = start("shared")
        assert not alone.has_begun(0.2), "it began while others ran"
        first.end()
        assert not alone.has_begun(0.2) and not late.has_begun(0), "it began while another ran, or was overtaken"
        second.end()
        assert alone.has_begun(PATIENCE)
        assert not late.has_begun(0.2), "another test began while one was alone"
        alone.end()
        assert late.has_begun(PATIENCE)
        late.end()


def test_tests_that_are_alone_in_a_row_wait_once(tmp_path):
    """No other test runs between them. The end of the row, by another test or none, frees both locks."""
    turns, items = Turns(tmp_path), {kind: item(kind, kind) for kind in ("alone", "shared")}
    for kinds in (["alone", "alone", "alone"], ["alone", "shared", "alone"], ["shared", "alone", "alone", "shared"]):
        for kind, following in zip(kinds, [*kinds[1:], None]):
            turn = turns.pytest_runtest_protocol(items[kind], items.get(following))
            next(turn)
            assert is_locked(turns.floor, fcntl.LOCK_SH) == is_locked(turns.gate) == (kind == "alone"), kinds
            assert is_locked(turns.floor)
            turn.close()
            is_within = kind == following == "alone"
            assert is_locked(turns.floor) == is_locked(turns.gate) == is_within, f"after {kind} of {kinds}"


def test_the_lock_of_a_process_that_died_is_free(tmp_path):
    with workers(tmp_path) as started:
        started.append(Worker(tmp_path, "alone"))
        assert started[0].has_begun(PATIENCE)
        os.kill(started[0].process.pid, 9)
        started.append(Worker(tmp_path, "shared"))
        assert started[1].has_begun(PATIENCE)


def test_planted_bugs_fit_the_sources():
    bugs = read_bugs()
    stale = [bug.id for bug in bugs if bug.is_stale(ROOT)]
    assert [test for bug in bugs for test in bug.tests if not (ROOT / test).exists()] == []
    assert not stale, f"tests/planted/bugs.txt: lines of {', '.join(stale)} are not in their files exactly once"
