"""`benchmarks/experts.py` runs on small shapes."""

from __future__ import annotations

import math
import sys

from benchmarks import experts
from benchmarks.random_weights import SHAPE_KEYS
from pace.bench.shapes import SHAPES
from tests.benchmarks.shapes import SMALL


def test_a_row_for_each_kind_of_weights(quick_limits, monkeypatch, capsys):
    sizes = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    monkeypatch.setitem(SHAPES, "small", SHAPES["qwen3-30b-a3b"] | SMALL | sizes)
    monkeypatch.setitem(SHAPES, experts.DENSE, SHAPES[experts.DENSE] | SMALL)
    sizes = ["--layers", "2", "--prompt", "20", "--generate", "3", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["experts.py", "--shape", "small", "--weights", "bfloat16", "int8", *sizes])
    assert experts.main() == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| small")]
    assert [row[2].strip() for row in rows] == ["bfloat16", "int8"]
    for row in rows:
        found = dict(zip([*SHAPE_KEYS, *experts.COLUMNS], row, strict=True))
        assert float(found["decode t/s"]) > 0 and float(found["prompt t/s"]) > 0
        # Shares and rates of such a small shape may round to 0 on a busy machine.
        assert all(0 <= float(cell) < math.inf for cell in row[len(SHAPE_KEYS) :])
