"""The examples run as a user runs them, on the bundled model, and print sensible output."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import pace

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(name, *arguments, stdin="") -> stdout` of an example, run in this process, which has imported the
    libraries."""

    def run(name: str, *arguments: str, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_basic_is_what_make_demo_runs():
    """A separate process prints a story, a line of metrics, and nothing on stderr."""
    environment = {**os.environ, "PYTHONPATH": str(Path(pace.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "examples/pace_llm_basic.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.rstrip("\n").split("\n")
    story = "\n".join(lines[1:-1])
    assert lines[0].startswith("prompt: ") and re.search(r"\d tokens/s", lines[-1])
    assert "fox" in story and len(re.findall(r"[A-Za-z]+", story)) > 40 and "\ufffd" not in story


def test_basic_with_options(run):
    answer = run(
        "pace_llm_basic.py",
        "--prompt",
        "Count from 3 to 9.",
        "--dtype",
        "float32",
        "--num-threads",
        "1",
        "--max-new-tokens",
        "40",
    )
    assert "3, 4, 5, 6, 7, 8, 9\n" in answer
    short = ["--max-new-tokens", "30"]
    sampled = [*short, "--do-sample", "--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--seed", "3"]
    first, second, greedy = (run("pace_llm_basic.py", *options) for options in (sampled, sampled, short))
    assert texts(first) == texts(second) != texts(greedy)


def texts(output: str) -> str:
    """Output of the basic example, without its line of metrics."""
    return output.rstrip("\n").rpartition("\n")[0]


def test_streamer(run):
    assert run("pace_llm_streamer.py", "What is the capital of Japan?") == "The capital of Japan is Tokyo.\n"


def test_batch(run):
    output = run("pace_llm_batch.py")
    for answer in (
        "7 + 8 = 15 [stop]",
        "The capital of Japan is Tokyo. [stop]",
        "3, 4, 5, 6, 7, 8, 9 [stop]",
        "same texts: True",
    ):
        assert answer in output


def test_speculative(run):
    for sampling in ([], ["--do-sample"]):
        output = run("pace_llm_speculative.py", "--max-new-tokens", "40", *sampling)
        assert output.count("same text: True") == 6 and "same text: False" not in output
        assert sampling or "  Every morning Ludwig waters his seven cactus plants before breakfast.\n" in output


def test_quantized(run):
    """Fewer bits give less memory and less likelihood: the first model gives its own text the highest likelihood."""
    output = run("pace_llm_quantized.py")
    found = re.findall(
        r"^(.+): [\d.]+ MiB of weights, ([\d.]+) times less.*log-probability of the first text (-[\d.]+)$",
        output,
        re.MULTILINE,
    )
    times, likelihood = ({name: float(row[column]) for name, *row in found} for column in (0, 1))
    assert (
        times["bfloat16"]
        == 1
        < 1.9
        < times["fp8"]
        < times["int8"]
        < 2
        < times["int4, but int8 down"]
        < times["int4"]
        == times["nf4"]
    )
    assert all(
        abs(value - likelihood["bfloat16"]) < (0.02 if name in ("int8", "fp8") else 0.1)
        for name, value in likelihood.items()
    )


def test_beam(run):
    lines = run("pace_llm_beam.py", "--num-beams", "3", "--num-return-sequences", "2").splitlines()
    numbers = [float(re.search(r"log-probability +(-[\d.]+) in 16 tokens", line)[1]) for line in lines[1:4]]
    assert [line.split(":")[0] for line in lines] == ["prompt", "greedy", "3 beams", "3 beams", "scores"]
    scores = [float(score) for score in lines[4].removeprefix("scores: ").split(", ")]
    assert scores == pytest.approx([number / 16 for number in numbers[1:]], abs=1e-4) and scores[0] > scores[1]
    assert numbers[1] >= numbers[0], "beams found a text at least as likely"


def test_chat(run):
    output = run("pace_llm_chat.py", stdin="What is the capital of Spain?\nAnd of Portugal?\n\n")
    assert output == "The capital of Spain is Madrid.\nThe capital of Portugal is Lisbon.\n"


def test_json(run):
    out = run("pace_llm_json.py")
    person = json.loads(out[: out.rindex("}") + 1])
    assert set(person) == {"name", "age", "likes"} and 0 <= person["age"] <= 120
    assert re.search(r"[1-9]\d* of \d+ tokens needed no step", out)


def test_tools(run):
    out = run("pace_llm_tools.py")
    assert 'get_weather({"city": "Rome"}) -> sunny, 24 degrees' in out and out.endswith("24 degrees.\n")


def test_guidance(run):
    pytest.importorskip("guidance")
    answer, choices, capitals = run("pace_llm_guidance.py").splitlines()
    assert (answer, capitals) == ("It is 24 degrees.", "Tokyo Cairo Madrid") and choices in ("5 dogs", "5 cats")


def test_kani(run):
    pytest.importorskip("kani")
    called, told, *capitals = run("pace_llm_kani.py").splitlines()
    assert (called, told) == ('get_weather({"city": "Rome"}) -> sunny, 24 degrees', "It is 24 degrees.")
    assert [line.partition(" [")[0] for line in capitals] == [
        "The capital of Japan is Tokyo.",
        "The capital of Egypt is Cairo.",
    ]


def test_prefix(run):
    """Every prompt except the first begins with the cached system prompt, and a second turn with the whole first
    turn."""
    output = run("pace_llm_prefix.py")
    counts = [
        (int(tokens), int(reused))
        for tokens, reused in re.findall(r"\[(\d+) tokens, (\d+) reused, first token", output)
    ]
    assert len(counts) == 6 and counts[0][1] == 0 and all(reused > 60 for _, reused in counts[1:])
    assert all(second_reused > first - 16 for (first, _), (_, second_reused) in zip(counts[::2], counts[1::2]))
    without = run("pace_llm_prefix.py", "--prefix-cache-bytes", "0")
    assert set(re.findall(r"(\d+) reused", without)) == {"0"} and answers(without) == answers(output)


def answers(output: str) -> list[str]:
    """Answers, without the counts and the report on memory."""
    return re.sub(r" \[\d+ tokens.*\]", "", output).rpartition("\n\n")[0].split("\n")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short_and_say_how_to_run_them(name):
    source = (ROOT / "examples" / name).read_text()
    assert source.count("\n") < 80 and f"python examples/{name}" in source


def test_another_model_by_path(run, tmp_path):
    """`--model` accepts a checkpoint that is not bundled, here one without a chat template."""
    transformers = pytest.importorskip("transformers")
    from pace.assets import TINY

    config = transformers.OPTConfig(
        vocab_size=2048,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
    )
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes((TINY / "tokenizer_config.json").read_bytes())
    assert "tokens/s" in run(
        "pace_llm_basic.py", "--model", str(tmp_path), "--prompt", "Hello", "--max-new-tokens", "5"
    )
