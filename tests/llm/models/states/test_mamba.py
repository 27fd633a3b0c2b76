"""Configs and checkpoints of families with Mamba-2 layers: every spelling of a field, and what is refused."""

from __future__ import annotations

import json
import logging
import math

import pytest

from pace.checkpoints.files import read_json_object
from pace.llm.models.model_list import read_config
from tests.llm.models.states.mamba_variants import MAMBA_BASE
from tests.llm.models.states.published_mamba import MAMBAS
from tests.llm.models.variants import config_fields


def config_of(model_type: str, **fields):
    return read_config({"model_type": model_type, **config_fields(model_type, fields)})[1]


def test_fields_of_published_models():
    nano = read_config(MAMBAS["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])[1].mamba
    assert (nano.inner, nano.channels) == (4096, 4096 + 2 * 8 * 128)


INFINITE = ["[0.0, Infinity]", '[0.0, {"__float__": "Infinity"}]', "[0, 1e30]"]


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"])
def test_a_limit_of_steps_may_be_infinite(model_type, tmp_path):
    text = json.dumps({"model_type": model_type, **config_fields(model_type, {})})
    for limits in INFINITE:
        (tmp_path / "config.json").write_text(f'{text[:-1]}, "time_step_limit": {limits}}}')
        low, high = read_config(read_json_object(tmp_path / "config.json"))[1].time_step_limit
        assert (low, high) == (0.0, 1e30 if "1e30" in limits else math.inf)


@pytest.mark.parametrize("text", ['{"a": Infinity}', '{"time_step_limit": {"a": [Infinity]}}', "[Infinity]",
                                  '{"time_step_limit": NaN}', '{"time_step_limit": -Infinity}'])  # fmt: skip
def test_no_other_field_may_be_infinite(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="Infinity is not a JSON number|NaN is not a JSON number"):
        read_json_object(tmp_path / "config.json")


@pytest.mark.parametrize("limits", [None, [1.0], [0.5, 0.2], [-1.0, 1.0], ["a", 1.0], [0.0, {"__float__": "NaN"}]])
def test_wrong_limits_are_refused(limits):
    with pytest.raises(ValueError, match="time_step_limit must be two numbers low and high"):
        config_of("mamba2", time_step_limit=limits)


def test_old_and_new_names_of_layers_are_read_alike():
    new = ["linear_attention", "full_attention"]
    expected = config_of("granitemoehybrid", layer_types=new)
    assert config_of("granitemoehybrid", layer_types=["mamba", "attention"]) == expected
    fields = {name: value for name, value in MAMBA_BASE["granitemoehybrid"].items() if name != "layer_types"}
    raw = {"model_type": "granitemoehybrid", **config_fields("granitemoehybrid", {}), **fields}
    del raw["layer_types"]
    assert read_config(raw | {"layers_block_type": ["mamba", "attention"]})[1] == expected
    with pytest.raises(ValueError, match="contradicts its other spelling"):
        read_config(raw | {"layers_block_type": ["mamba", "attention"], "layer_types": ["attention", "mamba"]})

    kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    expected = config_of("nemotron_h", layers_block_type=kinds)
    assert expected.layer_types == tuple(kinds) and expected.num_hidden_layers == 4
    assert config_of("nemotron_h", hybrid_override_pattern="ME*-") == expected
    assert config_of("nemotron_h", layers_block_type=["mamba", "moe", "attention", "mlp"]) == expected
    assert config_of("nemotron_h") == expected
    with pytest.raises(ValueError, match="hybrid_override_pattern contradicts"):
        config_of("nemotron_h", layers_block_type=kinds, hybrid_override_pattern="ME*M")
    with pytest.raises(NotImplementedError, match="the letter 'X'"):
        config_of("nemotron_h", hybrid_override_pattern="MX")


def test_the_kinds_of_layers_win_over_their_number(caplog):
    with caplog.at_level(logging.WARNING, "pace"):
        assert config_of("nemotron_h", num_hidden_layers=7).num_hidden_layers == 4
    assert "num_hidden_layers = 7 is ignored" in caplog.text


@pytest.mark.parametrize(("model_type", "fields", "error", "message"), [
    ("bamba", {"mamba_d_head": 7}, ValueError, "the heads of Mamba must have 64 elements together"),
    ("bamba", {"mamba_n_groups": 3}, ValueError, "mamba_n_heads must be a multiple of mamba_n_groups"),
    ("bamba", {"mamba_d_head": "wide"}, ValueError, 'mamba_d_head must be an integer .* or "auto"'),
    ("bamba", {"hidden_act": "gelu"}, NotImplementedError, "hidden_act = 'gelu' is not implemented for Mamba"),
    ("mamba2", {"num_heads": 4}, ValueError, "must be hidden_size \\* expand"),
    ("mamba2", {"hidden_act": "relu"}, NotImplementedError, "hidden_act"),
    ("mamba2", {"rms_norm": False}, NotImplementedError, "rms_norm"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, NotImplementedError, "'alibi' is not implemented"),
    ("granitemoehybrid", {"layer_types": ["mamba"]}, ValueError, "layer_types must name all 2 layers"),
    ("granitemoehybrid", {"normalization_function": "layernorm"}, NotImplementedError, "normalization_function"),
    ("nemotron_h", {"mamba_hidden_act": "relu"}, NotImplementedError, "mamba_hidden_act"),
    ("falcon_h1", {"ssm_multipliers": [1.0]}, ValueError, "a list of 5 numbers"),
    ("falcon_h1", {"projectors_bias": True}, NotImplementedError, "projectors_bias"),
])  # fmt: skip
def test_refusals_name_the_field(model_type, fields, error, message):
    with pytest.raises(error, match=message):
        config_of(model_type, **fields)


def test_a_width_may_be_automatic():
    assert config_of("bamba", mamba_d_head="auto") == config_of("bamba", mamba_d_head=8)
    assert config_of("falcon_h1", mamba_d_ssm=None, mamba_n_heads=8, mamba_d_head="auto").mamba.inner == 64
