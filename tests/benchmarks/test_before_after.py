"""The table of `benchmarks/before_after.py`: ratios over pairs, and rows that a partial run leaves unchanged."""

from __future__ import annotations

from argparse import Namespace

from benchmarks import page
from benchmarks.before_after import KEYS, SCRIPT, Case, table
from benchmarks.page import earlier_rows

OPTIONS = Namespace(num_threads=None, prompt=128, generate=32, rounds=2, loads=1)


RUNS = [[100.0, 1.0], [200.0, 1.0], [100.0, 1.0]], [[98.0, 1], [100.0, 1], [99.0, 1]]


def case(model: str, format: str, factor: float) -> Case:
    before = [[100.0, 10.0], [200.0, 20.0], [300.0, 30.0]]
    return Case(model, format, 8, "avx2", False, before, [[factor * one, two] for one, two in before])


def test_a_ratio_is_the_median_over_pairs():
    slower = Case("bundled", "int8", 1, "avx2", False, *RUNS)
    assert slower.ratio(0) == 0.98
    assert slower.row() == "| bundled | int8 | 1 | avx2 | 100.0 | 99.0 | 0.980 | 1.0 | 1.0 | 1.000 |"


def test_of_the_best_runs_where_that_is_asked_for():
    slower = Case("bundled", "int8", 1, "avx2", True, *RUNS)
    assert slower.row() == "| bundled | int8 | 1 | avx2 | 200.0 | 100.0 | 0.500 | 1.0 | 1.0 | 1.000 |"


def test_a_partial_run_replaces_its_own_rows(tmp_path):
    path = tmp_path / "page.md"
    begin, end = page.markers(SCRIPT)
    path.write_text(f"{begin}\n{end}\n| not | of | 1 | the table |\n")
    assert earlier_rows(None, SCRIPT, KEYS) == earlier_rows(path, SCRIPT, KEYS) == {}
    first = [case("bundled", "bf16", 1.0), case("bundled", "int8", 0.9)]
    page.write_into(path, SCRIPT, table(first, OPTIONS, earlier_rows(path, SCRIPT, KEYS)))
    again = [case("bundled", "int8", 1.25), case("qwen2.5-0.5b", "int8", 1.5)]
    page.write_into(path, SCRIPT, table(again, OPTIONS, earlier_rows(path, SCRIPT, KEYS)))
    rows = list(earlier_rows(path, SCRIPT, KEYS).values())
    assert rows == [first[0].row(), again[0].row(), again[1].row()]
