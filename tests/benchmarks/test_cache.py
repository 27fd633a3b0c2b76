"""benchmarks/cache.py: the numbers of the strategies are right, and the tables are written between their markers."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import cache
from benchmarks.page import markers
from pace.assets import TINY
from pace.bench import measure


@pytest.fixture(scope="module")
def subject():
    return measure.load(str(TINY))


def test_strategies_hold_and_copy_what_they_say(subject):
    context, generated, batch = 40, 60, 2
    block = subject.engine.cache.spec.block_bytes
    runs = {
        name: cache.decode(subject, options, context, generated, batch)
        for name, options in cache.strategies([16, 48]).items()
    }
    for name in ("paged", "paged, prefix cache"):
        assert (runs[name].copied_bytes, runs[name].copy_seconds, runs[name].held_bytes) == (0, 0.0, batch * 7 * block)
        assert batch * 7 * block <= runs[name].resident_bytes < 16 << 20, "what was written, in huge pages perhaps"
    # Both texts begin with 3 blocks (4 if r = 16) and grow to 7. Each growth copies the text's blocks. During the last
    # copy, one text holds 6 + 7 blocks and the other 7.
    assert (
        runs["dynamic"].copied_bytes == batch * (3 + 4 + 5 + 6) * block
        and runs["bmc, r = 16"].copied_bytes == batch * (4 + 5 + 6) * block
    )
    assert runs["dynamic"].held_bytes == (7 + 6 + 7) * block
    # The 40th position adds 48 rows: 6 blocks are copied, and the new room is never exhausted.
    assert (
        runs["bmc, r = 48"].copied_bytes == batch * 6 * block and runs["bmc, r = 48"].held_bytes == (7 + 6 + 7) * block
    )
    assert all(run.copy_seconds > 0 for name, run in runs.items() if run.copied_bytes)
    assert cache.ask_again(subject, {"prefix_cache_bytes": None}, 100, 2).reused_tokens == 64
    assert cache.ask_again(subject, {}, 100, 1).reused_tokens == 0


def test_too_much_is_told(subject):
    with pytest.raises(ValueError, match="need a cache of .* are there for it; take less"):
        cache.decode(subject, {}, 1000, 10, 1 << 20)


def test_the_tables_go_between_their_lines(quick_limits, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    begin, end = markers(cache.SCRIPT)
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "x",
            "--shape",
            str(TINY),
            "--context",
            "60",
            "--generate",
            "40",
            "--batch",
            "2",
            "--rows",
            "32",
            "--repeats",
            "1",
            "--into",
            str(page),
        ],
    )
    cache.main()
    text = page.read_text()
    assert (
        text.startswith(f"before\n{begin}\n`python benchmarks/cache.py --shape")
        and text.endswith(f" ms |\n{end}\nafter\n")
        and "old" not in text
    )
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")][1:6] == [
        "| paged",
        "| paged, prefix cache",
        "| bmc",
        "| bmc, r = 32",
        "| dynamic",
    ]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["strategy"] for row in result["strategies"]] == list(cache.strategies([32])) and result["strategies"][
        0
    ]["speed_of_paged"] == 1
    assert result["prefix"]["on"]["reused_tokens"] == 16 and result["copy_gb_per_s"] > 0 < result["attention_gb_per_s"]
    page.write_text("no lines")
    with pytest.raises(ValueError, match="needs the lines"):
        cache.main()
