"""Tiny checkpoints of every kind, each with a copy of the same weights as floats."""

from __future__ import annotations

import copy
import functools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints.quantized import packers
from tests.llm.models.variants import save_tiny

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "vocab_size": 96,
}  # fmt: skip

Pack = Callable[[int, int], packers.Packed]


def compressed(layout: str, packed_with: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": packed_with,
        "input_activations": {"num_bits": 8, "dynamic": False, "strategy": "tensor"},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | more


GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False,
    "damp_percent": 0.01,
}  # fmt: skip

KINDS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (GPTQ, lambda n, k: packers.gptq(n, k, 4, 32)),
    "gptq-act-order": (GPTQ | {"desc_act": True}, lambda n, k: packers.gptq(n, k, 4, 32, order="act-order")),
    "gptq-2bit-v2-zeros": (
        GPTQ | {"bits": 2, "checkpoint_format": "gptq_v2"},
        lambda n, k: packers.gptq(n, k, 2, 32, False, version=2),
    ),
    "gptq-3bit-rows": (GPTQ | {"bits": 3, "group_size": -1}, lambda n, k: packers.gptq(n, k, 3, -1, False)),
    "gptq-8bit-zeros": (GPTQ | {"bits": 8}, lambda n, k: packers.gptq(n, k, 8, 32, False)),
    "gptq-groups-of-24": (GPTQ | {"group_size": 24}, lambda n, k: packers.gptq(n, k, 4, 24)),
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        lambda n, k: packers.awq(n, k, 32),
    ),
    "bnb-nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda n, k: packers.bitsandbytes_4bit(n, k, nested=True),
    ),
    "bnb-fp4": ({"load_in_4bit": True, "load_in_8bit": False}, lambda n, k: packers.bitsandbytes_4bit(n, k, "fp4")),
    "bnb-int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
        packers.bitsandbytes_8bit,
    ),
    "compressed-int4": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        lambda n, k: packers.pack_quantized(n, k, 4, symmetric=False),
    ),
    "compressed-int8": (compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}), packers.int_quantized),
    "compressed-fp8": (
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        lambda n, k: packers.float8(n, k, (1, k), name="weight_scale"),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "static"},
        lambda n, k: packers.float8(n, k, (32, 32)),
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, packers.mxfp4),
    "mxfp6": (
        compressed("mxfp6-pack-quantized", {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32}),
        packers.mxfp6,
    ),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        lambda n, k: packers.nvfp4(n, k, ("m.weight", "m.weight_scale_2"), divides=False),
    ),
}
"""Name -> quantization_config, and the function that packs a module."""
OF_TOKENS: dict[str, tuple[dict[str, Any], Pack]] = {"bitnet": ({"quant_method": "bitnet"}, packers.bitnet)}
"""The same for models that round their inputs."""


@functools.cache
def tensors_of(
    kind: str, model_type: str, fields: tuple[tuple[str, Any], ...]
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """config.json without quantisation, the tensors of the quantised checkpoint, and the same weights as floats."""
    random.seed(0)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        of_experts = {"moe_intermediate_size": 64} if model_type == "qwen3_moe" else {}
        save_tiny(Path(folder), model_type, SIZES | of_experts | dict(fields))
        config = json.loads((Path(folder) / "config.json").read_text())
        floats = load_file(Path(folder) / "model.safetensors")
    state = {}
    for name, tensor in list(floats.items()):
        if not name.endswith(("_proj.weight", "_mqa.weight", "w1.weight", "w2.weight", "w3.weight")):
            state[name] = tensor
            continue
        packed, weight = (KINDS | OF_TOKENS)[kind][1](*tensor.shape)
        state |= {name.removesuffix("weight") + part.removeprefix("m."): value for part, value in packed.items()}
        floats[name] = weight.float()
    return config, state, floats


def save_quantized(
    folder: Path,
    kind: str,
    model_type: str = "llama",
    change: Callable[[dict, dict], object] = lambda state, config: None,
    **fields: Any,
) -> Path:
    """Writes the same weights to `folder/quantized` and `folder/floats`, and returns the first. Linear layers have the
    kind; embedding, head and norms are floats. `change` may damage the quantised tensors and the config."""
    config, state, floats = tensors_of(kind, model_type, tuple(sorted(fields.items())))
    save(folder / "floats", config, floats)
    state, config = dict(state), config | {"quantization_config": copy.deepcopy((KINDS | OF_TOKENS)[kind][0])}
    change(state, config)
    save(folder / "quantized", config, state)
    return folder / "quantized"


def save(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
