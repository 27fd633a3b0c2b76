"""`benchmarks/prefixes.py`: a second question about a document, in the same process and after a restart."""

from __future__ import annotations

import sys

import pytest

from benchmarks import prefixes
from pace.bench.shapes import SHAPES
from tests.benchmarks.shapes import SMALL

OF_STATES = dict(
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
SIZES = {
    "qwen3.5-0.8b": SMALL | OF_STATES,
    "gemma-3-1b": SMALL | {"query_pre_attn_scalar": 16, "sliding_window": 32, "num_hidden_layers": 6},
    "llama-3.2-1b": SMALL,
}
DOCUMENT, QUESTION = 320, 32


def run(monkeypatch, capsys, folder, shape: str, *more: str) -> dict[str, str]:
    """Returns the row of a small model of a shape, by the names of its columns."""
    monkeypatch.setitem(SHAPES, "small", SHAPES[shape] | SIZES[shape])
    words = ["--shape", "small", "--document", str(DOCUMENT), "--question", str(QUESTION), "--folder", str(folder)]
    monkeypatch.setattr(sys, "argv", ["prefixes.py", *words, "--kv-cache-bytes", "16MiB", "--threads", "1", *more])
    assert prefixes.main() == 0
    [row] = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| small")]
    return {name: cell.strip() for name, cell in zip(prefixes.HEADER, row, strict=True)}


@pytest.mark.parametrize("shape", SIZES)
def test_the_second_question_computes_itself_alone(monkeypatch, capsys, tmp_path, shape):
    monkeypatch.setattr(prefixes, "in_new_process", lambda function, case: function(case))
    row = run(monkeypatch, capsys, tmp_path, shape, "--documents", "2")
    assert row["reused"] == str(DOCUMENT) and row["question"] == str(QUESTION)
    assert all(float(row[name]) >= 0 for name in prefixes.HEADER[4:])


@pytest.mark.thorough
def test_the_saved_document_is_read_by_another_process(monkeypatch, capsys, tmp_path):
    row = run(monkeypatch, capsys, tmp_path, "qwen3.5-0.8b", "--documents", "1")
    assert row["reused"] == str(DOCUMENT) and float(row["restored s"]) > 0
