"""benchmarks/images.py: one small run, and what becomes of the results."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from benchmarks import images
from benchmarks.page import markers


def test_a_small_run(tmp_path, monkeypatch, capsys):
    into = tmp_path / "page.md"
    into.write_text("\n".join(markers(images.SCRIPT)))
    options = [
        "--shape",
        "tiny",
        "--parts",
        "gaps",
        "--weights",
        "bf16",
        "--sizes",
        "256x256",
        "640x480",
        "--rounds",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["images.py", *options, "--folder", str(tmp_path), "--into", str(into)])
    assert images.main() == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["gaps"]
    assert row["weights"] == "bf16" and 300 < row["tokens"] < 330
    assert 0 < row["encode_s"] <= row["encode_wall_s"] and row["bound_s"] == images.LEAST_GAP
    assert 0 < row["gap_in_encoding_s"] < row["first_token_s"] and row["gap_before_s"] > 0
    assert "| bf16 | 3" in into.read_text()


def run(peer: int, seconds: float, token: int = 1, tokens: int = 300) -> dict[str, float]:
    return {"peer": peer, "seconds": seconds, "encode_s": seconds / 2, "token": token, "tokens": tokens}


def test_the_fastest_tower_of_llama_cpp_counts():
    runs = [run(0, 1.0), run(1, 3.0), run(2, 2.0, token=5), run(0, 2.0), run(1, 3.0), run(2, 2.0)]
    row = images.summary(runs, ("bf16", "f16"))
    assert (row["llama_tower"], row["llama_s"], row["llama_encode_s"], row["pace_s"]) == ("f16", 2.0, 1.0, 1.5)
    assert row["ratio"] == 1.5 and row["same_tokens"] == 0.5
    (line,) = list(images.first_token_table([{"weights": "bf16", "width": 640, "height": 480, **row}]))[2:-1]
    assert line == "| bf16 | 640 x 480 | 300 | 1.50 s (0.75) | 2.00 s (1.00) | f16 | **1.50** | 50% |"
    with pytest.raises(RuntimeError, match=r"different numbers of tokens of the same prompt: \[300, 301\]"):
        images.summary([*runs, run(0, 1.0, tokens=301)], ("bf16", "f16"))


def test_llama_cpp_needs_its_paths(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["images.py", "--parts", "first-token"])
    with pytest.raises(SystemExit):
        images.main()
    assert "--parts first-token needs --llama-python and --llama-source" in capsys.readouterr().err
