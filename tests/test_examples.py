"""The examples run as a user runs them, on the bundled model, and say sensible things."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pace

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str, stdin: str = "") -> str:
    """stdout of an example, which must leave stderr to itself and end well."""
    environment = {**os.environ, "PYTHONPATH": str(Path(pace.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    result = subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_basic_is_what_make_demo_runs():
    output = run("pace_llm_basic.py")
    prompt, story, metrics = output.strip().split("\n\n", 2) if output.count("\n\n") == 2 else (output, output, output.strip().split("\n")[-1])
    assert "fox" in story and len(re.findall(r"[A-Za-z]+", story)) > 40 and "\ufffd" not in story
    assert re.search(r"\d tokens/s", metrics)


def test_basic_with_options():
    answer = run("pace_llm_basic.py", "--prompt", "Count from 3 to 9.", "--dtype", "float32", "--num-threads", "1", "--max-new-tokens", "40")
    assert "3, 4, 5, 6, 7, 8, 9\n" in answer
    sampled = ["--do-sample", "--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--seed", "3"]
    assert texts(run("pace_llm_basic.py", *sampled)) == texts(run("pace_llm_basic.py", *sampled)) != texts(run("pace_llm_basic.py"))


def texts(output: str) -> str:
    """What the basic example wrote, without its line of metrics."""
    return output.rstrip("\n").rpartition("\n")[0]


def test_streamer():
    assert run("pace_llm_streamer.py", "What is the capital of Japan?") == "The capital of Japan is Tokyo.\n"


def test_batch():
    output = run("pace_llm_batch.py")
    for answer in ("7 + 8 = 15 [stop]", "The capital of Japan is Tokyo. [stop]", "27, 28, 29, 30, 31, 32, 33, 34, 35 [stop]", "same texts: True"):
        assert answer in output


def test_chat():
    output = run("pace_llm_chat.py", stdin="What is the capital of Spain?\nAnd of Portugal?\n\n")
    assert output == "The capital of Spain is Madrid.\nThe capital of Portugal is Lisbon.\n"


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short_and_say_how_to_run_them(name):
    source = (ROOT / "examples" / name).read_text()
    assert source.count("\n") < 80 and f"python examples/{name}" in source


def test_another_model_by_path(tmp_path):
    """`--model` takes a checkpoint that is not bundled, here one without a chat template."""
    transformers = pytest.importorskip("transformers")
    from pace.assets import TINY

    config = transformers.OPTConfig(
        vocab_size=2048, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=32
    )
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes((TINY / "tokenizer_config.json").read_bytes())
    assert "tokens/s" in run("pace_llm_basic.py", "--model", str(tmp_path), "--prompt", "Hello", "--max-new-tokens", "5")
