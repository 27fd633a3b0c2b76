"""Results that `benchmarks/decoding.py` computes from runs, with made-up speeds."""

from __future__ import annotations

import json
import sys

from benchmarks import decoding
from benchmarks.page import markers


def test_ways_take_turns_piece_by_piece_and_the_first_round_does_not_count() -> None:
    calls = []

    def way(name: str, seconds: list[float]):
        def run(piece: str) -> tuple[int, float]:
            calls.append(name + piece)
            return 10, seconds[sum(call[0] == name for call in calls) - 1]

        return run

    ways = {"a": way("a", [100.0, 100.0, 1.0, 3.0, 4.0, 4.0]), "b": way("b", [1.0, 1.0, 2.0, 2.0, 8.0, 8.0])}
    speeds = decoding.take_turns(ways, ["1", "2"], 2)
    assert calls == ["b1", "a1", "a2", "b2"] * 3 and speeds == {"a": [5.0, 2.5], "b": [5.0, 1.25]}
    assert decoding.ratio(speeds, "a", "b") == 1.5


def test_a_missed_target_is_said() -> None:
    row = {
        "case": "copies",
        "drafts": "lookup",
        "plain_tokens_per_second": 1000.0,
        "drafted_tokens_per_second": 1900.0,
        "num_drafted": 80,
        "num_accepted": 60,
        "num_tokens": 100,
    }
    table = decoding.table_of_drafts(
        [{**row, "speedup": 1.9, "least": 2.0}, {**row, "speedup": 2.1, "least": 2.0, "num_drafted": 0}]
    )
    first, second = table.splitlines()[2:]
    assert first == "| copies | lookup | 1,000 | 1,900 | 1.90 | 2.00, missed | 0.80 | 75% |" and second.endswith(
        "| 2.10 | 2.00 | 0.00 | - |"
    )


def test_a_small_run(tmp_path, monkeypatch, capsys) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(markers(decoding.SCRIPT)))
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "decoding.py",
            "--requests",
            "1",
            "3",
            "--new-tokens",
            "4",
            "--repeats",
            "1",
            "--peer-dtypes",
            "float32",
            "--into",
            str(page),
        ],
    )
    decoding.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [result["requests"] for result in report["requests"]] == [1, 3]
    assert set(report["requests"][0]["tokens_per_second"]) == {"together", "one at a time", "transformers float32"}
    cases = [case for case in decoding.cases(4) if case.drafts != "mtp"]  # there is no such checkpoint
    assert len(report["drafts"]) == len(cases) and all(result["speedup"] > 0 for result in report["drafts"])
    assert "| stories | draft |" in page.read_text()
