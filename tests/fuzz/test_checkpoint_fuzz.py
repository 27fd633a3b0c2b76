"""A sample of the fuzz cases in the default suite; the full run is `python -m tests.fuzz.run --cases 2000`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from tests.fuzz import mutate, run
from tests.fuzz.checkpoints import dump
from tests.llm.models.variants import save_tiny
from tests.plugins.tiers import quarter

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["of this commit", pytest.param("all", marks=pytest.mark.thorough)])
def test_damaged_checkpoints_give_one_clear_error_or_run(part):
    """Runs in a separate process, which forks and limits its memory. Each commit tests a quarter of the checkpoints."""
    cases = 400 if part == "all" else 100
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.run", "--cases", str(cases)]
    if part != "all":
        command += ["--quarter", str(quarter())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, f"{command}\n{done.stderr[-5000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["cases"] == cases
    # Both outcomes occur: some mutations are harmless, most are not.
    assert counts["loaded"] >= cases // 20 and counts["ValueError"] >= cases // 4, counts


def test_the_same_seed_gives_the_same_case():
    checkpoints = {
        "a": {"config.json": b'{"x": [1, 2]}', "model.safetensors": dump("safetensors", {"w": torch.ones(3)})}
    }
    checkpoints["a"] |= {"model-00001-of-00001.safetensors": checkpoints["a"]["model.safetensors"]}
    done = 0
    for seed in range(60):
        try:
            first = mutate.make_case(seed, checkpoints)
        except (ValueError, KeyError, IndexError):
            continue  # this small checkpoint has no place for the mutation
        assert first == mutate.make_case(seed, checkpoints)
        done += 1
    assert done > 20


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died with status"),
        (lambda: signal.pause(), "hung"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: bytearray(run.MAX_GROWTH_BYTES + (256 << 20)).count(b"x"), "MB of memory"),
        (lambda: Path("hacked").touch(), "ran code"),
        (lambda: (_ for _ in ()).throw(ValueError("something is wrong")), "names no file or field"),
    ],
    ids=["crash", "hang", "undocumented error", "memory", "code", "unclear message"],
)
def test_the_harness_notices(behaviour, expected, monkeypatch, tmp_path):
    """One planted case behaves badly, the next one well."""
    if expected == "hung":
        monkeypatch.setattr(run, "CASE_SECONDS", 2)
    monkeypatch.setattr(run, "make_case", lambda seed, checkpoints: ({"config.json": b"{}"}, f"case {seed}"))
    monkeypatch.setattr(run, "generate", lambda case: behaviour() or "loaded" if case.name == "case-1" else "loaded")
    outcomes, failures = run.run_cases([1, 2], {}, tmp_path)
    assert outcomes == {"failed": 1, "loaded": 1}
    assert len(failures) == 1 and expected in failures[0]


def test_the_harness_notices_weights_that_are_not_filled(monkeypatch, tmp_path):
    save_tiny(tmp_path / "llama", "llama", {})
    from pace.llm.layers import Linear

    fill = Linear._fill
    monkeypatch.setattr(Linear, "_fill", lambda self, source, tensor, row: fill(self, source[:-1], tensor, row))
    load = lambda: load_model(LoadOptions(tmp_path / "llama", dtype=torch.float32, num_threads=1, progress=False))
    assert run.poisoned_bits(load, 0.0) != run.poisoned_bits(load, 7.5)
    monkeypatch.undo()
    assert run.poisoned_bits(load, 0.0) == run.poisoned_bits(load, 7.5)
