"""benchmarks/encoders.py: its arithmetic, and one small run."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest

from benchmarks import encoders
from benchmarks.encoder_costs import checkpoint, peers
from benchmarks.page import markers

MINILM, QWEN = (checkpoint.SHAPES[name].config for name in ("all-minilm-l6-v2", "qwen3-embedding-0.6b"))


def test_operations_of_a_text():
    weights = 6 * (4 * 384 * 384 + 2 * 384 * 1536)  # 10.6 million
    assert checkpoint.flops(MINILM, 100) == 2 * 100 * weights + 6 * 4 * 384 * 100 * 100
    weights = 28 * (1024 * 128 * (16 + 8 + 8 + 16) + 3 * 1024 * 3072)  # 440 million
    assert checkpoint.flops(QWEN, 3) == 2 * 3 * weights + 28 * 4 * 16 * 128 * (1 + 2 + 3)


def test_lengths_of_texts():
    assert checkpoint.lengths_of("128", 1000) == [128] * 7
    assert checkpoint.lengths_of("512", 100) == [512]
    lengths = checkpoint.lengths_of("mixed", 20_000)
    assert 8 <= min(lengths) < 9 and 490 < max(lengths) <= 512 and sum(lengths) == pytest.approx(20_000, rel=0.02)
    assert sorted(lengths)[len(lengths) // 2] == pytest.approx(math.sqrt(8 * 512), rel=0.05)
    assert lengths == checkpoint.lengths_of("mixed", 20_000) != sorted(lengths)
    assert list(map(len, encoders.words_of(MINILM, [16, 8], 0))) == [14, 6]
    assert list(map(len, encoders.words_of(QWEN, [16, 8], 0))) == [16, 8]
    assert encoders.words_of(QWEN, [16], 0) != encoders.words_of(QWEN, [16], 1)


def test_the_fastest_kind_of_a_peer_counts():
    found = {
        ("pace", "bf16"): [1.0, 2.0, 3.0],
        ("llama.cpp", "bf16"): [9.0, 9.0, 9.0],
        ("llama.cpp", "f16"): [4.0, 4.0, 9.0],
    }
    row = encoders.summary(found, "bf16")
    assert row == {"seconds": 2.0, "peers": {"llama.cpp": {"variant": "f16", "seconds": 4.0, "ratio": 3.0}}}
    row |= {"shape": "tiny", "weights": "bf16", "length": "16", "texts": 100, "mfu": 0.5, "least_cosine": 1}
    assert encoders.throughput_line(row) == "| tiny | bf16 | 16 | 50.0 | 50% | - | - | 25.0 (**3.00**) |"
    assert encoders.latency_line(row) == "| tiny | bf16 | 2,000.00 ms | - | - | 4,000.00 ms (**3.00**) | 1.0000 |"
    assert all(len({row.count("|") for row in head}) == 1 for head in encoders.HEADS)


def test_poolings_of_padded_rows():
    rows, mask = np.arange(12.0).reshape(2, 3, 2), np.array([[1, 1, 0], [1, 1, 1]])
    assert peers.pooled(rows, mask, "cls").tolist() == [[0, 1], [6, 7]]
    assert peers.pooled(rows, mask, "lasttoken").tolist() == [[2, 3], [10, 11]]
    assert peers.pooled(rows, mask, "mean").tolist() == [[1, 2], [8, 9]]


@pytest.mark.thorough
def test_a_small_run(tmp_path, monkeypatch, capsys):
    into = tmp_path / "page.md"
    into.write_text("\n".join(markers(encoders.SCRIPT)))
    options = "--shapes tiny --weights int8 --lengths 16 mixed --tokens 256 --rounds 1".split()
    monkeypatch.setattr(sys, "argv", ["encoders.py", *options, "--folder", str(tmp_path), "--into", str(into)])
    assert encoders.main() == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["texts"] for row in report["throughput"]] == [16, 4]
    assert all(row["seconds"] > 0 < row["mfu"] < 2 and row["peers"] == {} for row in report["throughput"])
    assert report["latency"][0]["least_cosine"] == pytest.approx(1, abs=1e-5)
    assert "| tiny | int8 | mixed |" in into.read_text()


def test_llama_cpp_needs_both_paths(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["encoders.py", "--llama-python", "python"])
    with pytest.raises(SystemExit):
        encoders.main()
