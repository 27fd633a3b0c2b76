"""Peak memory of loading quantised checkpoints, measured in separate processes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.load import measure, write_checkpoint
from tests.editing import change_json, edit_tensors

# A matrix of 11 million weights in each layer: the largest of a model with 1 billion. Embedding and head are small.
SIZES = {
    "vocab_size": 512, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
# Memory in addition to the weights. Each of the two threads has the codes of a piece, a byte each (4 MB), its words,
# and the buffer for their permutation. File pages are dropped after each piece. The first use of the kernels also
# allocates memory.
OVERHEAD_BYTES = 96 << 20


def numbers(*shape):
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def gptq(n, k):
    groups = k // 128
    index = (torch.arange(k) // 128)[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
    return {
        "qweight": numbers(k // 8, n),
        "qzeros": numbers(groups, n // 8),
        "scales": torch.rand(groups, n).half() * 0.01,
        "g_idx": index.int(),
    }


def awq(n, k):
    return {
        "qweight": numbers(k, n // 8),
        "qzeros": numbers(k // 128, n // 8),
        "scales": torch.rand(k // 128, n).half() * 0.01,
    }


def packed(n, k):
    return {
        "weight_packed": numbers(n, k // 8),
        "weight_scale": torch.rand(n, k // 128).half() * 0.01,
        "weight_shape": torch.tensor([n, k]),
    }


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
KINDS = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, awq),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"g": {"weights": WEIGHTS}},
        },
        packed,
    ),
}


@pytest.mark.parametrize(
    "kind", ["gptq", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("awq", "compressed-tensors"))]
)
@pytest.mark.alone
def test_peak_memory_is_the_quantised_weights_and_little_more(kind, tmp_path):
    quantization, pack = KINDS[kind]
    folder = tmp_path / "model"
    write_checkpoint(folder, torch.bfloat16, "safetensors", **SIZES)
    with edit_tensors(folder) as state:
        for name in [name for name in state if name.endswith("_proj.weight")]:
            packed = pack(*state.pop(name).shape)
            state |= {name.removesuffix("weight") + part: tensor for part, tensor in packed.items()}
    change_json(folder / "config.json", quantization_config=quantization)
    row = measure(folder, "bfloat16", num_threads=2)
    above_start = row["peak_bytes"] - row["start_bytes"]
    assert above_start <= 1.1 * row["weights_bytes"] + OVERHEAD_BYTES, row
    assert above_start >= 0.9 * row["weights_bytes"], f"this does not measure the load: {row}"
    assert row["weights_bytes"] < 0.3 * 2 * 98e6, "it was loaded as floats"
