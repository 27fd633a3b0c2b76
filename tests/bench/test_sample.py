"""Layers of a checkpoint that `pace plan` runs: their choice, and their effect on the predictions."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from pace.assets import TINY
from pace.bench import plan, sample
from pace.bench.limits import Limits
from pace.cli import main
from pace.llm.loading.checkpoint import Checkpoint, read_config_json
from pace.ops import native
from tests.editing import edit_tensors
from tests.llm.models.variants import save_tiny

LIMITS = Limits("avx2", 1, 10.0, 100.0)
GIB = 1 << 30


def layers_of(*sizes):
    return [SimpleNamespace(planned_nbytes=lambda ops, dtype, size=size: size) for size in sizes]


@pytest.mark.parametrize(
    "sizes, num_bytes, chosen",
    [
        ([4] * 8, 10**9, [0, 1, 2, 3, 4, 5, 6, 7]),  # all of a small model
        ([4] * 8, 16, [1, 3, 5, 7]),
        ([4] * 8, 1, [4]),
        ([6, 4, 4, 6, 4, 4, 6, 4, 4], 1, [0, 4]),  # one of each size
        ([6, 4, 4, 6, 4, 4, 6, 4, 4], 14, [2, 3, 7]),  # a third of each
    ],
)
def test_layers_are_spread_over_their_sizes(sizes, num_bytes, chosen):
    layers = layers_of(*sizes)
    found = sample.choose_layers(layers, torch.bfloat16, num_bytes)
    assert [layers.index(layer) for layer in found] == chosen


def plans(path, tried, **options):
    config = read_config_json(path)
    return plan.plan(config, LIMITS, 8 * GIB, prompt=64, sample=tried, **options)


@pytest.fixture
def runs(monkeypatch):
    """Replaces the clock: a prompt takes three times as long as predicted, a step twice. Returns the models."""
    models = []

    def measured(model, asked):
        models.append(model)
        costs = sample.Costs.of(model, model.dtype, model.kv_dtype)
        layers, head = sample.efficiencies(LIMITS.isa, model.dtype, costs)
        predicted = sample.predict(costs, layers, LIMITS, *asked, head)
        return 3 * predicted.prefill_seconds, 2 * predicted.step_seconds

    monkeypatch.setattr(sample, "_measure", measured)
    return models


def test_predictions_are_corrected_by_what_was_measured(runs):
    for one, other in zip(plans(TINY, None), plans(TINY, sample.Sample(Checkpoint(TINY))), strict=True):
        assert other.prefill_tokens_per_second == pytest.approx(one.prefill_tokens_per_second / 3)
        assert other.decode_tokens_per_second == pytest.approx(one.decode_tokens_per_second / 2)
        assert (one.dtype, one.weight_bytes, one.max_context) == (other.dtype, other.weight_bytes, other.max_context)
    held = Counter(model.storage_name for model in runs)
    assert held == {"bfloat16": 1, "float16": 1, "float32": 1, "int8": 1, "int4": 1}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "deepseek_v3"])
def test_a_few_layers_of_a_large_model_are_run(family, tmp_path, monkeypatch):
    save_tiny(tmp_path / "model", family, {})
    monkeypatch.setattr(sample, "SAMPLE_BYTES", 1)
    measure, seen = sample._measure, []
    monkeypatch.setattr(
        sample, "_measure", lambda model, asked: seen.append(len(model.layers)) or measure(model, asked)
    )
    tried = sample.Sample(Checkpoint(tmp_path / "model"))
    corrections = tried.corrections(torch.bfloat16, torch.bfloat16, None, LIMITS, sample.Prompts(64, 100_000, 2))
    assert corrections.prefill > 0 and corrections.decode > 0
    sizes = {layer.planned_nbytes(native, torch.bfloat16) for layer in plan_layers(tmp_path / "model")}
    assert seen == [len(sizes)]


def plan_layers(path):
    model_class, config = plan.read_config(read_config_json(path))
    return model_class(config, torch.bfloat16, native).layers


@pytest.mark.parametrize("options, sampled", [([], True), (["--no-sample"], False)])
def test_the_command_says_whether_layers_were_tried(options, sampled, capsys, quick_limits):
    assert main(["plan", str(TINY), "--prompt", "32", *options]) == 0
    assert ("from a run of a few of its layers" in capsys.readouterr().out) == sampled
    assert main(["plan", str(TINY), "--prompt", "32", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["sampled"] == sampled


def test_without_weights_the_config_is_enough(tmp_path, capsys, quick_limits):
    shutil.copy(TINY / "config.json", tmp_path)
    assert main(["plan", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["sampled"] and len(found["plans"]) == 5


def test_a_load_that_cannot_be_tried_is_predicted(tmp_path, quick_limits, capsys):
    """Too few positions, and more cache than is taken for a sample."""
    save_tiny(tmp_path, "llama", {"max_position_embeddings": 20})
    for options in (["--prompt", "8"], ["--prompt", "8", "--batch", "1000000"]):
        assert main(["plan", str(tmp_path), "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert not found["sampled"] and len(found["plans"]) == 5
    assert main(["plan", str(TINY), "--json", "--batch", "1000000"]) == 0
    assert not json.loads(capsys.readouterr().out)["sampled"]


def changed(path, change):
    """Writes a checkpoint with one element of a weight changed."""
    save_tiny(path, "llama", {})
    with edit_tensors(path) as state:
        change(state["model.layers.0.mlp.down_proj.weight"])
    return str(path)


def test_a_dtype_that_cannot_hold_the_weights_is_left_out(tmp_path, quick_limits, capsys):
    path = changed(tmp_path, lambda weight: weight[0, 0].fill_(1e5))
    assert main(["plan", path, "--prompt", "8", "--json"]) == 0
    captured = capsys.readouterr()
    assert [plan["dtype"] for plan in json.loads(captured.out)["plans"]] == ["bfloat16", "float32", "int8", "int4"]
    assert "float16 is left out" in captured.err


@pytest.mark.parametrize("command", ["plan", "bench"])
def test_weights_that_give_no_numbers_are_an_error(command, tmp_path, quick_limits, capsys):
    path = changed(tmp_path, lambda weight: weight.fill_(math.nan))
    assert main([command, path, "--prompt", "8"]) == 1 and "NaN" in capsys.readouterr().err
