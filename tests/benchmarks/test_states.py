"""`benchmarks/states.py` runs on small shapes."""

from __future__ import annotations

import sys

from benchmarks import states
from benchmarks.random_weights import SHAPE_KEYS
from pace.bench.shapes import SHAPES
from tests.benchmarks.test_prefixes import SIZES


def test_a_row_for_each_kind_of_weights(quick_limits, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "small", SHAPES["qwen3.5-0.8b"] | SIZES["qwen3.5-0.8b"])
    sizes = ["--prompt", "40", "--generate", "3", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["states.py", "--shape", "small", *sizes])
    assert states.main() == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| small")]
    assert [row[2].strip() for row in rows] == ["bfloat16", "int8"]
    for row in rows:
        found = {name: cell.strip() for name, cell in zip([*SHAPE_KEYS, *states.COLUMNS], row, strict=True)}
        assert 0 < float(found["recurrence"].rstrip("%")) < 100 and 0 < float(found["convolution"].rstrip("%")) < 100
        assert 0 < float(found["states of its bytes"].rstrip("%")) < 100 and float(found["prefill t/s"]) > 0
