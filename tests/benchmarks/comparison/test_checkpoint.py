"""Checkpoints of known shapes have the names and shapes of published ones."""

import pytest
import torch

from benchmarks.comparison.checkpoint import shape_config, write_checkpoint
from tests.benchmarks.shapes import SMALL

MIXTURE = dict(num_experts=8, top_k_experts=2, moe_intermediate_size=32, num_global_key_value_heads=1)


@pytest.mark.parametrize("shape, changes", [("gemma-4-26b-a4b", MIXTURE | dict(global_head_dim=32)), ("qwen3-4b", {})])
def test_transformers_finds_each_tensor(tmp_path, shape, changes):
    from transformers import AutoModelForCausalLM

    write_checkpoint(shape_config(shape) | SMALL | changes | dict(layer_types=None), tmp_path)
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(found.values()), found
