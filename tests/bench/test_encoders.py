"""`pace bench` and `pace plan` of encoders: operations and bytes, one small run, and options without a meaning."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.encoder_costs.checkpoint import SHAPES, ensure_checkpoint
from benchmarks.encoder_costs.checkpoint import flops as flops_of_shape
from pace.bench import encoders, limits
from pace.checkpoints.safetensors_file import TensorInfo
from pace.cli import main
from pace.llm.models.encoders.encoder_list import read_encoder_config
from pace.ops import native
from pace.ops.weight_layout import WeightLayout

MACHINE = limits.Limits("avx2", 2, 50.0, 200.0)


pytestmark = pytest.mark.usefixtures("quick_limits")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(ensure_checkpoint("tiny", tmp_path_factory.mktemp("encoder")))


def costs_of(name, dtype=torch.float32, **fields):
    encoder_class, config = read_encoder_config(SHAPES[name].config | fields)
    return encoders.EncoderCosts.of(encoder_class(config, dtype, native), dtype)


@pytest.mark.parametrize("name", ["all-minilm-l6-v2", "bge-base"])
def test_operations_and_bytes_are_those_of_the_shape(name):
    config, costs = SHAPES[name].config, costs_of(name)
    for length in (1, 16, 512):
        assert costs.flops(length) == flops_of_shape(config, length)
    tables = (config["vocab_size"] + 512 + 2) * config["hidden_size"]
    assert costs.weight_bytes - costs.step_weight_bytes == pytest.approx(4 * tables, rel=0.001)
    assert costs.step_weight_bytes == pytest.approx(2 * costs.flops_per_token, rel=0.01)


def test_operations_of_experts_are_those_of_the_chosen():
    from tests.llm.models.encoders import nomic_moe as shape

    encoder_class, config = read_encoder_config(shape.CONFIG)
    costs = encoders.EncoderCosts.of(encoder_class(config, torch.float32, native), torch.float32)
    attention, mlp = 4 * shape.HIDDEN**2, 2 * shape.HIDDEN * shape.INNER
    mixture = shape.TOP * mlp + shape.HIDDEN * shape.EXPERTS
    assert costs.flops_per_token == 2 * (4 * attention + 2 * mlp + 2 * mixture)


def test_pairs_within_a_window():
    for length in (1, 2, 7):
        for side in (0, 1, 3, 6, 20, None):
            reach = length if side is None else side
            seen = sum(abs(a - b) <= reach for a in range(length) for b in range(length))
            assert encoders._pairs(length, side) == seen


def test_texts_that_fill_steps():
    assert [encoders.texts_of_step(length) for length in (1, 16, 300, 1024, 5000)] == [256, 64, 3, 1, 1]


def test_a_plan_reads_weights_once_a_step():
    found = {plan.dtype: plan for plan in encoders.plan(SHAPES["bge-base"].config, MACHINE, 8 << 30, 128)}
    assert list(found) == ["bfloat16", "float16", "float32", "int8", "int4"]
    assert all(plan.fits and plan.texts_per_second * plan.text_seconds > 0.999 for plan in found.values())
    costs = costs_of("bge-base")
    alone = costs.seconds(1, 1, torch.float32, MACHINE)
    assert alone == pytest.approx(costs.step_weight_bytes / (0.9 * 50e9), rel=0.01), "bound by memory"
    assert costs.seconds(512, 4, torch.float32, MACHINE) == pytest.approx(
        4 * costs.seconds(512, 1, torch.float32, MACHINE)
    )
    with pytest.raises(ValueError, match="1 to 512 tokens; got 513"):
        encoders.plan(SHAPES["bge-base"].config, MACHINE, 8 << 30, 513)
    tensors = {"weight": TensorInfo(WeightLayout("int8", 32), (768, 768))}  # of a GGUF file
    with pytest.raises(NotImplementedError, match="quantised already"):
        encoders.plan(SHAPES["bge-base"].config, MACHINE, 8 << 30, tensors=tensors)


def test_commands_on_an_encoder(checkpoint, capsys):
    assert main(["bench", checkpoint, "--prompt", "40", "--repeats", "1", "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["texts"] == 100 and found["tokens_of_a_text"] == 40 and found["held_as"] == "float32"
    assert found["texts_per_s"] > 0 < found["mfu"] and found["text_s"] > 0
    assert main(["bench", checkpoint, "--repeats", "1", "--prompt", "512", "--quantization", "int8"]) == 0
    assert "8 texts of 512 tokens" in capsys.readouterr().out
    assert main(["plan", checkpoint, "--prompt", "64", "--json"]) == 0
    assert [plan["dtype"] for plan in json.loads(capsys.readouterr().out)["plans"]][-1] == "int4"
    assert main(["plan", checkpoint, "--quantization", "int8"]) == 0
    assert "texts of 512 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["plan", "--batch", "2"], ["bench", "--generate", "3"], ["bench", "--profile"],
                                     ["bench", "--image-tokens", "9"]])  # fmt: skip
def test_options_of_generation_have_no_meaning(command, checkpoint, capsys):
    with pytest.raises(SystemExit):
        main([command[0], checkpoint, *command[1:]])
    assert f"{command[1]} has no meaning for an encoder" in capsys.readouterr().err
