"""Costs told from a config are those of the loaded model, and the formulas of operations count what a forward pass multiplies."""

from __future__ import annotations

import pytest
import torch

from pace.bench.costs import Costs
from pace.bench.limits import Limits
from pace.bench.plan import PROCESS_BYTES, plan
from pace.bench.shapes import SHAPES, RandomWeights
from pace.llm.models.model_list import read_config
from pace.ops import native
from tests.llm.models.variants import IDS, VARIANTS, save_tiny
from tests.support import load_model

pytest.importorskip("transformers")


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=IDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_those_of_the_loaded_model(variant, dtype, tmp_path):
    model_type, _, fields = VARIANTS[variant]
    save_tiny(tmp_path, model_type, fields)
    loaded = load_model(tmp_path, dtype, native)
    costs = Costs.of(loaded, dtype)
    assert costs.weight_bytes == loaded.nbytes
    assert costs.kv_bytes_per_token == loaded.kv_spec.position_bytes
    assert costs.decode_weight_bytes <= costs.weight_bytes


def tiny_llama(**changes):
    config = SHAPES["llama-3.2-1b"] | dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=96)
    model_class, parsed = read_config(config | changes)
    return model_class(parsed, torch.float32, native)


def test_an_embedding_of_its_own_is_not_read_by_a_step():
    tied, untied = (Costs.of(tiny_llama(tie_word_embeddings=tie), torch.float32) for tie in (True, False))
    assert tied.decode_weight_bytes == tied.weight_bytes == untied.decode_weight_bytes
    assert untied.weight_bytes - tied.weight_bytes == 64 + 96 * 32 * 4  # header and matrix


def test_operations_by_hand():
    costs = Costs.of(tiny_llama(), torch.float32)
    per_layer = 32 * (4 + 2 + 2) * 16 + 4 * 16 * 32 + 3 * 32 * 64
    assert costs.layer_flops_per_token == 2 * 3 * per_layer
    assert costs.head_flops == 2 * 96 * 32
    assert costs.attention_flops_per_pair == 3 * 4 * (2 * 16 + 2 * 16)
    assert costs.prefill_flops(5) == 5 * costs.layer_flops_per_token + 15 * costs.attention_flops_per_pair + costs.head_flops
    assert costs.kv_bytes_per_token == 3 * 2 * (16 + 16) * 4
    assert costs.decode_bytes(2, 10) == costs.decode_weight_bytes + 20 * costs.kv_bytes_per_token


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_config_that_pace_reads(name):
    model_class, config = read_config(SHAPES[name])
    model = model_class(config, torch.bfloat16, native)
    billions = {"135m": 0.135, "125m": 0.125, "0.5b": 0.49, "0.6b": 0.6, "1b": 1.24, "1.1b": 1.1, "1.3b": 1.32, "1.5b": 1.54, "1.7b": 1.72, "phi-2": 2.78, "3b": 3.15, "4b": 4.02,
                "6b": 6.05, "7b": 7.4, "8b": 8.1}
    elements = sum(torch.Size(slot.shape).numel() for slot in model.slots().values())
    expected = billions[name if name in billions else name.split("-")[-1]]
    assert elements / 1e9 == pytest.approx(expected, rel=0.05)


def test_random_weights_fill_a_model():
    model = tiny_llama()
    model.load_weights(RandomWeights(model))
    assert model.nbytes == Costs.of(model, torch.float32).weight_bytes
    reader = RandomWeights(model)
    reader.PIECE_ELEMENTS = 64
    assert reader.row_ranges("model.embed_tokens.weight") == [(row, row + 2) for row in range(0, 96, 2)]
    assert reader.read("model.norm.weight").eq(1).all() and reader.read("model.embed_tokens.weight", 3, 7).shape == (4, 32)


def test_a_plan_follows_memory_and_limits():
    config = SHAPES["qwen2.5-0.5b"]
    limits = Limits("avx2", 2, 10.0, 100.0)
    roomy = {p.dtype: p for p in plan(config, limits, 64 << 30)}
    assert roomy["bfloat16"].max_context == roomy["float32"].max_context == 32768
    assert roomy["float32"].weight_bytes > 1.9 * roomy["bfloat16"].weight_bytes
    assert roomy["bfloat16"].decode_tokens_per_second == pytest.approx(9e9 / (roomy["bfloat16"].weight_bytes + 512 * 12288))
    assert roomy["bfloat16"].prefill_tokens_per_second == roomy["float32"].prefill_tokens_per_second
    faster = {p.dtype: p for p in plan(config, Limits("avx512_bf16", 2, 10.0, 100.0), 64 << 30)}
    assert faster["bfloat16"].prefill_tokens_per_second > 1.5 * faster["float32"].prefill_tokens_per_second

    tight = plan(config, limits, roomy["bfloat16"].weight_bytes + PROCESS_BYTES + 100 * 12288)
    assert [(p.dtype, p.max_context, p.fits) for p in tight] == [("bfloat16", 100, True), ("float16", 100, True), ("float32", 0, False)]
