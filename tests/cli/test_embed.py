"""`pace embed`: vectors and scores as lines of JSON."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch

from pace.assets import TINY
from pace.cli import main
from pace.llm import EmbeddingModel
from tests.llm.encoding.checkpoints import save_causal


def lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_vectors_are_those_of_the_class_in_all_bits(capsys, tmp_path, monkeypatch):
    texts = ["A fox jumps.", "It rains – again."]
    with EmbeddingModel(TINY, progress=False) as model:
        expected = model.embed(texts, dimensions=8)
    assert main(["embed", str(TINY), *texts, "--dimensions", "8"]) == 0
    first = lines(capsys)
    assert [line["index"] for line in first] == [0, 1]
    assert torch.equal(torch.tensor([line["embedding"] for line in first]), expected)
    (tmp_path / "texts").write_text("\n".join([texts[0], "", texts[1], ""]), encoding="utf-8")
    assert main(["embed", str(TINY), "--file", str(tmp_path / "texts"), "--dimensions", "8"]) == 0
    assert lines(capsys) == first
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(texts).encode())))
    assert main(["embed", str(TINY), "--dimensions", "8"]) == 0
    assert lines(capsys) == first


def test_texts_are_ranked(capsys, tmp_path):
    pytest.importorskip("transformers")
    save_causal(tmp_path)
    assert main(["embed", str(tmp_path), "a fox", "no", "--rank", "what?"]) == 0
    found = lines(capsys)
    assert sorted(line["text"] for line in found) == ["a fox", "no"]
    assert found[0]["score"] >= found[1]["score"] and found[0]["text"] == ["a fox", "no"][found[0]["index"]]


def test_command_lines_that_make_no_sense(capsys, tmp_path):
    for message, words in [
        ("texts are given twice", ["a", "--file", __file__]),
        ("there is no file", ["--file", str(tmp_path / "none")]),
        ("--rank prints scores", ["a", "--rank", "b", "--dimensions", "3"]),
        ("at least 1", ["a", "--dimensions", "0"]),
        ("--mmproj is for images and sound", ["a", "--mmproj", "towers.gguf"]),
    ]:
        with pytest.raises(SystemExit):
            main(["embed", str(TINY), *words])
        assert message in capsys.readouterr().err
    assert main(["embed", str(TINY), "a", "--prompt", "query"]) == 1
    assert "prompt must be the name of one of this model's prompts, none; got 'query'" in capsys.readouterr().err
