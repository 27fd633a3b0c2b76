"""Refused and damaged checkpoints: one clear error each, before or while weights are read."""

from __future__ import annotations

import json

import pytest
import torch

from pace.checkpoints.quantized import read_quant_method
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from tests.checkpoints.quantized.models import KINDS, save_quantized

Q = "model.layers.0.self_attn.q_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}


def compressed(**more):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128} | more.pop("weights", {})
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    } | more


@pytest.mark.parametrize(
    ("config", "told"),
    [
        *[
            ({"quant_method": name}, f"quant_method = '{name}'.*original")
            for name in ("aqlm", "quip", "hqq", "eetq", "vptq", "higgs", "torchao", "quanto", "spqr", "fbgemm_fp8")
        ],
        ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm = True is not implemented"),
        ({"quant_method": "auto-round"}, "AutoRound"),
        ({"quant_method": "gguf"}, ".gguf file"),
        ({"quant_method": "a new one"}, "'a new one'.*gptq, awq, bitsandbytes, compressed-tensors"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'.*gptq_v2"),
        (GPTQ | {"format": "bitblas"}, "bitblas"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype = 'int16'"),
        (GPTQ | {"rotation": "hadamard"}, "rotation"),
        *[(AWQ | {"version": version}, f"version = '{version}'.*gemm") for version in ("gemv", "GEMV_FAST", "marlin")],
        (AWQ | {"backend": "llm-awq"}, "llm-awq.*AutoAWQ"),
        (compressed(format="nvfp4-pack-quantized", weights={"type": "float", "num_bits": 8}), "num_bits.*nvfp4-pack"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo = 'NVFP4_AWQ'.*FP8_PB_WO"),
        (MIXED | {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}}, "quantized_layers.a.quant_algo = 'W4A8_AWQ'"),
        (compressed(format="marlin-24"), "marlin-24"),
        (compressed(format="dense"), "format = 'dense'"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask.*without sparsity"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (compressed(format="float-quantized", weights={"type": "float", "num_bits": 4}), "num_bits"),
        (compressed(config_groups={"g": {"weights": None, "input_activations": {}}}), "config_groups"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_by_name(config, told):
    with pytest.raises(NotImplementedError, match=f"config.json: quantization_config.*{told}"):
        read_quant_method(config)


@pytest.mark.parametrize(
    ("config", "told"),
    [("gptq", "an object or null; got 'gptq'"), ([1], "an object"), ({}, "quant_method must be"),
     ({"quant_method": 3}, "quant_method must be"), (GPTQ | {"bits": 5}, "bits must be 2, 3, 4 or 8; got 5"),
     (GPTQ | {"bits": "4"}, "bits must be"), (GPTQ | {"bits": True}, "bits must be"),
     (GPTQ | {"group_size": 0}, "group_size must be -1"), (GPTQ | {"group_size": 2**40}, "group_size must be -1"),
     (GPTQ | {"group_size": 12.5}, "group_size must be -1"),
     (GPTQ | {"desc_act": "yes"}, "desc_act must be true or false"), (GPTQ | {"dynamic": [1]}, "dynamic must be"),
     (GPTQ | {"checkpoint_format": 3}, "checkpoint_format must be a name"),
     (AWQ | {"bits": 8}, "bits must be 4; got 8"), (AWQ | {"group_size": -2}, "group_size must be"),
     ({"quant_method": "bitnet", "linear_class": "linear"}, "linear_class must be bitlinear or autobitlinear"),
     ({"quant_method": "bitnet", "quantization_mode": "later"}, "quantization_mode must be offline or online"),
     ({"quant_method": "bitnet", "modules_to_not_convert": "lm_head"}, "must be a list of names or null"),
     ({"quant_method": "bitsandbytes"}, "load_in_4bit must be"),
     ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit must be"),
     ({"quant_method": "bitsandbytes", "load_in_4bit": 1}, "load_in_4bit must be true or false"),
     (compressed(config_groups={}), "config_groups must be"),
     (compressed(config_groups={"g": 3}), "config_groups.g must be"),
     (compressed(weights={"num_bits": 1}), "num_bits must be 2, 3"),
     (compressed(weights={"group_size": "x"}), "group_size must be"),
     (compressed(weights={"block_structure": [128]}), "block_structure must be two integers"),
     (compressed(weights={"block_structure": "128x-3"}), "block_structure must be two integers"),
     (compressed(sparsity_config=3), "sparsity_config must be"),
     ({"quant_method": "modelopt"}, "quant_algo must be one of FP8"),
     ({"quant_method": "modelopt", "quantization": []}, "quantization must be an object"),
     (MIXED | {"quantized_layers": {"a": "FP8"}}, "quantized_layers.a must be an object"),
     ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size must be two integers"),
     ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size must be two integers")],
    ids=str,
)  # fmt: skip
def test_configs_that_make_no_sense(config, told):
    with pytest.raises(ValueError, match=f"config.json: quantization_config.*{told}"):
        read_quant_method(config)


def set_first(state, name, value):
    state[name] = state[name].clone()
    state[name].view(-1)[0] = value


def without(suffix):
    return lambda state, config: state.pop(Q + suffix)


def first(suffix, value):
    return lambda state, config: set_first(state, Q + suffix, value)


def changed(suffix, change):
    return lambda state, config: state.__setitem__(Q + suffix, change(state[Q + suffix]).contiguous())


def configured(**fields):
    return lambda state, config: config["quantization_config"].update(fields)


def with_state(**fields):
    def change(state, config):
        name = f"{Q}.weight.quant_state.bitsandbytes__nf4"
        value = json.loads(bytes(state[name].tolist())) | fields
        state[name] = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)

    return change


DAMAGES = [
    ("gptq", without(".qzeros"), "q_proj.qweight.*lacks.*q_proj.qzeros"),
    ("gptq", without(".scales"), "lacks.*q_proj.scales"),
    ("gptq", without(".qweight"), r"missing \(1\): .*q_proj.weight"),
    ("gptq", changed(".qweight", lambda t: t[:-1]), "q_proj"),
    ("gptq", changed(".qweight", lambda t: t.long()), "q_proj.qweight' is int64.*int32"),
    ("gptq", changed(".qweight", lambda t: t[:0]), "q_proj"),
    ("gptq", changed(".qzeros", lambda t: t[:, :-1]), "q_proj.*bits"),
    ("gptq", changed(".scales", lambda t: t.t()), "q_proj.scales'.*shape"),
    ("gptq", changed(".scales", lambda t: t[:1]), "q_proj"),
    ("gptq", changed(".g_idx", lambda t: t[:-1]), "q_proj.g_idx' is int32 of shape"),
    ("gptq", first(".g_idx", 2), r"q_proj.g_idx' must hold groups in 0..1; got 0..2"),
    ("gptq", first(".g_idx", -1), r"q_proj.g_idx' must hold groups in 0..1; got -1..1"),
    ("gptq", first(".scales", torch.nan), "q_proj.scales' holds nan"),
    ("gptq", first(".scales", torch.inf), "q_proj.scales' holds inf"), ("gptq", configured(bits=8), "bits"),
    ("gptq", configured(group_size=16), "group"), ("gptq-act-order", without(".g_idx"), "desc_act needs.*q_proj.g_idx"),
    ("gptq", lambda state, config: state.update({f"{Q}.weight": torch.zeros(64, 64)}),
      "q_proj.weight quantised.*and not quantised"),
    ("gptq", lambda state, config: config.pop("quantization_config"), "qweight.*no quantization_config"),
    ("gptq", configured(quant_method="fp8"), "quantization_config .fp8., but no tensor"),
    ("gptq", configured(quant_method="awq"), r"\.qzeros' is int32"),
    ("awq", changed(".qzeros", lambda t: t[:1]), "q_proj.qzeros'.*shape"),
    ("awq", first(".scales", torch.nan), "q_proj.scales' holds nan"),
    ("awq", configured(group_size=64), r"\.qzeros' is int32"),
    ("bnb-nf4", without(".weight.absmax"), "lacks.*q_proj.weight.absmax"),
    ("bnb-nf4", without(".weight.quant_map"), "lacks.*quant_map"),
    ("bnb-nf4", without(".weight.quant_state.bitsandbytes__nf4"), "lacks.*quant_state.bitsandbytes__nf4"),
    ("bnb-nf4", without(".weight.nested_absmax"), "lacks nested_absmax"),
    ("bnb-nf4", without(".weight.nested_quant_map"), "lacks nested_quant_map"),
    ("bnb-nf4", changed(".weight", lambda t: t[:-1]), "q_proj.weight' has 2047 bytes"),
    ("bnb-nf4", changed(".weight.absmax", lambda t: t[1:]), "absmax'.*shape"),
    ("bnb-nf4", first(".weight.nested_absmax", torch.nan), "nested_absmax' holds nan"),
    ("bnb-nf4", first(".weight.quant_map", torch.nan), "quant_map' holds nan"),
    ("bnb-nf4", with_state(shape=[64, 10**12]), "shape in tensor"),
    ("bnb-nf4", with_state(shape=64), "shape in tensor"), ("bnb-nf4", with_state(blocksize=0), "blocksize in tensor"),
    ("bnb-nf4", with_state(blocksize=128), "absmax'"),
    ("bnb-nf4", with_state(nested_blocksize=None), "nested_blocksize in tensor"),
    ("bnb-nf4", with_state(nested_offset="x"), "nested_offset in tensor"),
    ("bnb-nf4", first(".weight.quant_state.bitsandbytes__nf4", 7), "must hold a JSON object"),
    ("bnb-int8", without(".SCB"), "lacks.*q_proj.SCB"), ("bnb-int8", first(".SCB", torch.inf), "q_proj.SCB' holds inf"),
    ("bnb-int8", changed(".SCB", lambda t: t[1:]), "q_proj.SCB'.*shape"),
    ("compressed-int4", without(".weight_shape"), "lacks.*weight_shape"),
    ("compressed-int4", first(".weight_shape", 65), "weight_packed'.*weight_shape"),
    ("compressed-int4", first(".weight_scale", torch.nan), "weight_scale' holds nan"),
    ("compressed-int4", changed(".weight_zero_point", lambda t: t[1:]), "weight_zero_point'.*shape"),
    ("compressed-int4", changed(".weight_scale", lambda t: t.repeat(1, 2)), "weight_scale' has 4 groups"),
    ("compressed-int4", changed(".weight_zero_point", lambda t: torch.full((64, 2), 8, dtype=torch.int8)),
      "zero points of 8..8; with 4 bits they are -8..7"),
    ("compressed-int8", without(".weight_scale"), "lacks.*weight_scale"),
    ("compressed-int8", changed(".weight_scale", lambda t: t[1:]), "weight_scale'.*shape"),
    ("compressed-int8", changed(".weight_scale", lambda t: t[:, :0]), "weight_scale' has 0 groups"),
    ("compressed-fp8", first(".weight_scale", torch.inf), "weight_scale' holds inf"),
    ("fp8", without(".weight_scale_inv"), "lacks.*weight_scale_inv"),
    ("fp8", changed(".weight_scale_inv", lambda t: t[:1]), "weight_scale_inv'.*shape"),
    ("fp8", first(".weight_scale_inv", torch.nan), "weight_scale_inv' holds nan"),
    ("fp8", configured(weight_block_size=[128, 128]), "weight_scale_inv'.*shape"),
    ("mxfp4", without(".weight_scales"), "lacks.*weight_scales"),
    ("mxfp4", changed(".weight_blocks", lambda t: t[:, :1]), "weight_blocks'.*shape"),
    ("mxfp4", first(".weight_scales", 255), "weight_scales' holds nan"),
    ("mxfp6", without(".weight_scale"), "lacks.*weight_scale"),
    ("mxfp6", changed(".weight_scale", lambda t: t.float()), "weight_scale' is float32"),
    ("mxfp6", first(".weight_scale", 255), "weight_scale' holds nan"),
    ("modelopt-nvfp4", without(".weight_scale_2"), "lacks.*weight_scale_2"),
    ("modelopt-nvfp4", without(".weight_scale"), "lacks.*weight_scale"),
    ("modelopt-nvfp4", changed(".weight", lambda t: t[:, :-1]), "weight' is uint8 of shape"),
    ("modelopt-nvfp4", changed(".weight_scale", lambda t: t.float()), "weight_scale' is float32"),
    ("modelopt-nvfp4", first(".weight_scale", torch.nan), "weight_scale' holds nan"),
    ("modelopt-nvfp4", first(".weight_scale_2", torch.inf), "weight_scale_2' holds inf"),
    ("modelopt-nvfp4", first(".weight_scale_2", 0), "weight_scale_2' must be positive; got 0"),
    ("modelopt-nvfp4", changed(".weight_scale_2", lambda t: t.expand(2)), "weight_scale_2'.*shape"),
    ("modelopt-nvfp4", configured(quant_algo=None), "quant_algo must be one of FP8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "damage", "told"), DAMAGES, ids=[f"{kind}-{i}" for i, (kind, _, _) in enumerate(DAMAGES)]
)
def test_damaged_checkpoints(kind, damage, told, tmp_path):
    folder = save_quantized(tmp_path, kind, change=damage)
    with pytest.raises(ValueError, match=told):
        load_model(LoadOptions(folder, dtype="float32", backend="torch", progress=False))


def test_scaled_inputs_are_refused_by_name(tmp_path):
    folder = save_quantized(
        tmp_path, "modelopt-nvfp4", change=lambda state, config: state.update({f"{Q}.pre_quant_scale": torch.ones(64)})
    )
    with pytest.raises(NotImplementedError, match="q_proj.pre_quant_scale' scales inputs.*W4A16_NVFP4"):
        load_model(LoadOptions(folder, dtype="float32", backend="torch", progress=False))


def test_layouts_for_other_machines(tmp_path):
    folder = save_quantized(tmp_path, "bnb-int8", change=changed(".weight_format", lambda t: t + 2))
    with pytest.raises(NotImplementedError, match="weight_format' is 2.*by rows"):
        load_model(LoadOptions(folder, dtype="float32", backend="torch", progress=False))


def test_every_kind_has_a_damage():
    assert {kind.split("-")[0] for kind in KINDS} == {kind.split("-")[0] for kind, _, _ in DAMAGES}
