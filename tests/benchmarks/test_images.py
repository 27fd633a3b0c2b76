"""benchmarks/images.py: one small run, and what becomes of the results."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from PIL import Image

from benchmarks import images
from benchmarks.image_costs.checkpoint import (
    NAMES,
    TINY_NAMES,
    ensure_checkpoint,
    family_of,
    shape_config,
    sizes_of,
    write_image,
)
from benchmarks.page import earlier_rows, markers, write_into
from pace.bench.shapes import SHAPES
from pace.llm import LLMModel
from pace.llm.models.model_list import read_config
from pace.llm.processors.registry import make_processors
from tests.plugins.tiers import sample

TOKENS = {
    "qwen3-vl-2b": [300, 1024, 1280], "gemma-3-4b-vl": [256], "smolvlm-500m": [320, 832, 1088],
    "qwen3.5-4b-vl": [300, 1024, 1280],
}  # fmt: skip
"""Rows of the images of each shape."""
TINY_TOKENS = {"qwen3-vl-2b-tiny": 300, "gemma-3-4b-vl-tiny": 16, "smolvlm-500m-tiny": 20, "qwen3.5-4b-vl-tiny": 300}


def test_a_small_run(tmp_path, monkeypatch, capsys):
    into = tmp_path / "page.md"
    into.write_text("\n".join(markers(images.SCRIPT)))
    options = ["--shapes", "qwen3-vl-2b-tiny", "--parts", "gaps", "--weights", "bf16", "--rounds", "1"]
    options += ["--sizes", "256x256", "640x480", "--folder", str(tmp_path), "--into", str(into)]
    monkeypatch.setattr(sys, "argv", ["images.py", *options])
    assert images.main() == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["gaps"]
    assert row["weights"] == "bf16" and 300 < row["tokens"] < 330
    assert 0 < row["encode_s"] <= row["encode_wall_s"] and row["bound_s"] == images.LEAST_GAP
    assert 0 < row["gap_in_encoding_s"] < row["first_token_s"] and row["gap_before_s"] > 0
    assert "| qwen3-vl-2b-tiny | bf16 | 640 x 480 | 3" in into.read_text()


@pytest.mark.parametrize("shape", NAMES)
def test_checkpoints_have_the_sizes_of_pace_bench(shape):
    """Published layouts nest what `pace bench` has in one object."""
    _, whole = read_config(shape_config(shape), media=True)
    _, flat = read_config(SHAPES[shape], media=True)
    assert whole.vision == flat.vision
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings"):
        assert getattr(whole, name) == getattr(flat, name), name


@pytest.mark.parametrize("shape", NAMES)
def test_images_have_these_tokens(shape, tmp_path):
    config = shape_config(shape)
    settings = family_of(shape).processor(config["vision_config"])
    processor = make_processors(config["architectures"][0], config, lambda section: (settings, section)).image
    counts = []
    for size in sizes_of(shape):
        Image.new("RGB", size).save(tmp_path / "image.png")
        counts.append(processor.layout(tmp_path / "image.png").num_tokens)
    assert counts == TOKENS[shape]


@pytest.mark.parametrize("shape", sample(TINY_NAMES, lambda shape: False))
def test_a_checkpoint_answers(shape, tmp_path):
    image = write_image(tmp_path / "image.png", *sizes_of(shape)[0], seed=1)
    with LLMModel(ensure_checkpoint(shape, tmp_path), dtype="float32", progress=False) as model:
        placeholder = model.generator.encoder.processors["image"].placeholder
        prompt = {"prompt": placeholder, "images": [image]}
        output = model.generate(prompt, max_new_tokens=1, do_sample=False, ignore_eos=True)
    assert 0 <= output.metrics.num_prompt_tokens - TINY_TOKENS[shape] < 20


def run(peer: str, seconds: float, token: int = 1, tokens: int = 300, rate: float | None = None) -> dict[str, Any]:
    return {"peer": peer, "seconds": seconds, "encode_s": seconds / 2, "token": token, "tokens": tokens, "rate": rate}


def test_the_fastest_tower_of_llama_cpp_counts():
    runs = [run("pace", 1.0, rate=20.0), run("bf16", 3.0, rate=5.0), run("f16", 2.0, token=5)]
    runs += [run("pace", 2.0, rate=30.0), run("bf16", 3.0, rate=10.0), run("f16", 2.0)]
    row = images.summary(runs)
    assert (row["llama_tower"], row["llama_s"], row["llama_encode_s"], row["pace_s"]) == ("f16", 2.0, 1.0, 1.5)
    assert row["ratio"] == 1.5 and row["same_tokens"] == 0.5
    assert (row["pace_rate"], row["llama_rate"], row["rate_ratio"]) == (25.0, 7.5, 3.5)
    line = images.answer_line(images.named("qwen3-vl-2b", "bf16", (640, 480)) | row)
    assert line == (
        "| qwen3-vl-2b | bf16 | 640 x 480 | 300 | 1.50 s (0.75) | 2.00 s (1.00) | f16 | **1.50** | 50% | 25.0 | 7.5 | "
        "**3.50** |"
    )
    with pytest.raises(RuntimeError, match=r"different numbers of tokens of the same prompt: \[300, 301\]"):
        images.summary([*runs, run("pace", 1.0, tokens=301)])


class Answers:
    """A worker whose answers take `seconds`, for each tower."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[tuple[int, int]] = []

    def ask(self, operation: str, image: str, tower: int = 0, num_decoded: int = 0) -> dict[str, Any]:
        self.asked.append((tower, num_decoded))
        return run("", self.seconds[tower], rate=num_decoded or None)


def test_slow_towers_only_warm_up_and_one_tower_decodes():
    pace, llama = Answers(1.0), Answers(2.0, 2.6, 2.4)
    runs = images.turns(pace, llama, ["bf16", "f16", "q8_0"], lambda: "image.png", 1)
    assert pace.asked == [(0, 0), (0, images.DECODED)]
    assert llama.asked == [(0, 0), (1, 0), (2, 0), (0, images.DECODED), (2, 0)]
    assert len(runs) == 3


def test_rows_of_other_shapes_stay_on_the_page(tmp_path):
    path, part = tmp_path / "page.md", images.PARTS["first-token"]
    path.write_text("\n".join(markers(images.SCRIPT)))
    row = images.summary([run("pace", 1.0, rate=1.0), run("f16", 2.0, rate=1.0)])
    rows = {shape: images.named(shape, "bf16", (64, 64)) | row for shape in NAMES}
    other = images.PARTS["gaps"].head + "\n|---|\n| 1 | 2 | 3 |\n\n"
    for shape in (*NAMES[:2], NAMES[0]):
        earlier = earlier_rows(path, images.SCRIPT, images.KEYS, part.head)
        write_into(path, images.SCRIPT, other + part.table([rows[shape]], earlier))
    assert list(earlier_rows(path, images.SCRIPT, images.KEYS, part.head)) == [
        (shape, "bf16", "64 x 64") for shape in NAMES[:2]
    ]


def test_llama_cpp_needs_its_paths(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["images.py", "--parts", "first-token"])
    with pytest.raises(SystemExit):
        images.main()
    assert "--parts first-token needs --llama-python and --llama-source" in capsys.readouterr().err
