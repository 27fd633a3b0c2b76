"""Costs derived from a config equal those of the loaded model, and the formulas count the multiply-adds of a forward
pass."""

from __future__ import annotations

import inspect

import pytest
import torch

from pace.bench.costs import AttentionCosts, Costs
from pace.bench.limits import Limits
from pace.bench.plan import PROCESS_BYTES, plan
from pace.bench.prediction import (
    AVX2,
    AVX2_CODES,
    AVX2_VNNI_CODES,
    AVX512_BF16,
    STEP_TOKENS,
    VNNI_CODES,
    Efficiency,
    efficiencies,
    efficiency,
    predict,
)
from pace.bench.shapes import SHAPES, RandomWeights
from pace.llm.engine.scheduler import Scheduler
from pace.llm.loading.checkpoint import read_config_json
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from pace.llm.models.model_list import read_config
from pace.ops import native
from pace.quant import FORMATS, QuantizationConfig
from tests.llm.models.variants import save_tiny

pytest.importorskip("transformers")


def tiny_llama(**changes):
    config = SHAPES["llama-3.2-1b"] | dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=96,
    )
    model_class, parsed = read_config(config | changes)
    return model_class(parsed, torch.float32, native)


def test_an_embedding_of_its_own_is_not_read_by_a_step():
    tied, untied = (Costs.of(tiny_llama(tie_word_embeddings=tie), torch.float32) for tie in (True, False))
    assert tied.decode_weight_bytes == tied.weight_bytes == untied.decode_weight_bytes
    assert untied.weight_bytes - tied.weight_bytes == 64 + 96 * 32 * 4  # header and matrix


def test_layers_that_share_keys_run_for_one_token_of_a_prompt():
    """E2B's last 20 layers keep nothing, read keys in each decode step, and do not run for a prompt. Its table of
    embeddings for layers takes no memory."""
    model_class, config = read_config(SHAPES["gemma-4-e2b"])
    model = model_class(config, torch.bfloat16, native)
    costs = Costs.of(model, torch.bfloat16)
    assert costs.kv_bytes_per_token == 2 * (12 * 512 + 3 * 1024)
    assert costs.kv_bytes(1000) == 2 * (28 * 512 * 512 + 7 * 1024 * 1000)
    assert sum(layer.pairs(100) for layer in costs.attention) == 15 * 5050 + 20 * 100
    double_wide = 3 * 1536 * 2 * 6144 + 2 * 256 * 1536
    heads = 8 * 256 * 1536 * 2 * (16 + 2 * 4)
    assert costs.tail_flops == 2 * (20 * double_wide + heads)
    assert costs.file_weights == 262144 * 35 * 256
    assert costs.weight_bytes < 2.1 * (model.num_weights - costs.file_weights)


def test_operations_by_hand():
    costs = Costs.of(tiny_llama(), torch.float32)
    per_layer = 32 * (4 + 2 + 2) * 16 + 4 * 16 * 32 + 3 * 32 * 64
    assert costs.layer_flops_per_token == 2 * 3 * per_layer
    assert costs.head_flops == 2 * 96 * 32
    assert costs.decode_attention_flops(1) == 3 * 4 * (2 * 16 + 2 * 16)
    assert (
        costs.prefill_flops(5)
        == 5 * costs.layer_flops_per_token + 15 * costs.decode_attention_flops(1) + costs.head_flops
    )
    assert costs.kv_bytes_per_token == 3 * 2 * (16 + 16) * 4
    assert costs.decode_bytes(2, 10) == costs.decode_weight_bytes + 20 * costs.kv_bytes_per_token


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_config_that_pace_reads(name):
    model_class, config = read_config(SHAPES[name])
    model = model_class(config, torch.bfloat16, native)
    billions = {
        "135m": 0.135, "125m": 0.125, "0.5b": 0.49, "0.6b": 0.6, "1b": 1.24, "1.1b": 1.1, "1.3b": 1.32, "1.5b": 1.54,
        "1.7b": 1.72, "phi-2": 2.78, "3b": 3.15, "4b": 4.02, "6b": 6.05, "7b": 7.4, "8b": 8.1, "gemma-2-2b": 2.61,
        "gemma-2-9b": 9.24, "gemma-3-1b": 1.0, "gemma-3-4b": 3.88, "gemma-3-4b-vl": 3.88,
        "deepseek-v2-lite": 15.7, "glm-4.7-flash": 29.9,
        "qwen3-30b-a3b": 30.5, "mixtral-8x7b": 46.7, "gpt-oss-20b": 20.9,
        "lfm2-1.2b": 1.17, "qwen3.5-0.8b": 0.752, "qwen3.5-4b": 4.21, "qwen3.6-35b-a3b": 34.7,
        "qwen3-vl-2b": 1.72, "qwen3.5-4b-vl": 4.21, "smolvlm-500m": 0.409, "lfm2-vl-450m": 0.354,
        "gemma-4-e2b": 4.63, "gemma-4-26b-a4b": 25.2, "granite-4-h-tiny": 6.94, "nemotron-3-nano": 31.6,
    }  # fmt: skip
    elements = sum(torch.Size(target.shape).numel() for target, *_ in model.targets().values())
    expected = billions[name if name in billions else name.split("-")[-1]]
    assert elements / 1e9 == pytest.approx(expected, rel=0.05)


def test_random_weights_fill_a_model():
    model = tiny_llama()
    model.load_weights(RandomWeights(model))
    assert model.nbytes == Costs.of(model, torch.float32).weight_bytes
    reader = RandomWeights(model)
    reader.PIECE_ELEMENTS = 64
    assert reader.row_ranges("model.embed_tokens.weight") == [(row, row + 2) for row in range(0, 96, 2)]
    assert reader.read("model.norm.weight").eq(1).all()
    assert reader.read("model.embed_tokens.weight", 3, 7).shape == (4, 32)


def test_a_plan_of_a_quantised_checkpoint_needs_its_tensors():
    config = SHAPES["qwen2.5-0.5b"] | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    with pytest.raises(NotImplementedError, match="quantised already .GPTQ.*download it, and give its directory"):
        plan(config, Limits("avx2", 2, 10.0, 100.0), 64 << 30)


def test_a_plan_of_weights_held_in_a_format():
    limits = Limits("avx2", 2, 10.0, 100.0)
    plans = {p.dtype: p for p in plan(SHAPES["tinyllama-1.1b"], limits, 64 << 30)}
    assert list(plans) == ["bfloat16", "float16", "float32", "int8", "int4"]
    assert plans["bfloat16"].weight_bytes / plans["int4"].weight_bytes == pytest.approx(3.40, abs=0.005), (
        "as docs/quantization.md tells"
    )
    assert plans["int4"].kv_bytes_per_token == plans["bfloat16"].kv_bytes_per_token
    [asked] = plan(
        SHAPES["tinyllama-1.1b"], limits, 64 << 30, quantization=QuantizationConfig("int4", group=32, lm_head=None)
    )
    assert asked.dtype == "int4 (group=32)" and asked.weight_bytes > plans["int4"].weight_bytes
    model_class, config = read_config(SHAPES["tinyllama-1.1b"])
    model = model_class(config, torch.bfloat16, native)
    model.quantize(QuantizationConfig("int4"))
    costs = Costs.of(model, torch.bfloat16)
    layers, head = efficiencies("avx2", torch.bfloat16, costs)
    assert (layers, head) == (AVX2_CODES["int4"], AVX2_CODES["int8"])
    told = predict(costs, layers, limits, 512, 512, head=head)
    assert plans["int4"].decode_tokens_per_second == pytest.approx(1 / told.step_seconds)
    assert plans["int4"].prefill_tokens_per_second == pytest.approx(512 / told.prefill_seconds)


@pytest.mark.parametrize(
    ("name", "code"), [(None, None), ("int8", "int8"), ("int4", "int4"), ("nf4", "int4"), ("fp8", "float8")]
)
def test_shares_are_those_of_what_is_read_most_of(name, code):
    model_class, config = read_config(SHAPES["llama-3.1-8b"])
    model = model_class(config, torch.bfloat16, native)
    model.quantize(name and QuantizationConfig(name))
    assert Costs.of(model, torch.bfloat16).code == code
    for isa in ("generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"):
        shares = efficiency(isa, torch.bfloat16, code)
        assert 0 < shares.weights < 1 and shares.products > 0.5
    # A float embedding is most of a small model, but a step reads only single rows of it.
    model.quantize(name and QuantizationConfig(name, embedding=None))
    assert Costs.of(model, torch.bfloat16).code == code


def test_a_plan_follows_memory_and_limits():
    config = SHAPES["qwen2.5-0.5b"]
    limits = Limits("avx2", 2, 10.0, 100.0)
    roomy = {p.dtype: p for p in plan(config, limits, 64 << 30)}
    assert roomy["bfloat16"].max_context == roomy["float32"].max_context == 32768
    assert roomy["float32"].weight_bytes > 1.9 * roomy["bfloat16"].weight_bytes
    attention = 512 * max(12_288 / (10e9 * AVX2.cache), 86_016 / (100e9 * AVX2.decode_attention))
    seconds = roomy["bfloat16"].weight_bytes / (10e9 * AVX2.weights) + attention
    assert roomy["bfloat16"].decode_tokens_per_second == pytest.approx(1 / seconds)
    assert roomy["float32"].decode_tokens_per_second < 0.55 * roomy["bfloat16"].decode_tokens_per_second
    faster = {p.dtype: p for p in plan(config, Limits("avx512_bf16", 2, 10.0, 100.0), 64 << 30)}
    assert faster["bfloat16"].prefill_tokens_per_second > 1.5 * faster["float32"].prefill_tokens_per_second

    tight = plan(config, limits, roomy["bfloat16"].weight_bytes + PROCESS_BYTES + 100 * 12288)
    assert [
        p.max_context
        for p in plan(config, limits, roomy["bfloat16"].weight_bytes + PROCESS_BYTES + 100 * 12288, batch=3)
    ][:3] == [33, 33, 0]
    assert [(p.dtype, p.max_context, p.fits) for p in tight[:3]] == [
        ("bfloat16", 100, True),
        ("float16", 100, True),
        ("float32", 0, False),
    ]


def test_a_plan_for_a_cache_in_int8():
    config, limits = SHAPES["qwen2.5-0.5b"], Limits("avx2", 2, 10.0, 100.0)
    by_dtype = {p.dtype: p for p in plan(config, limits, 64 << 30, kv_cache_dtype="int8")}
    assert {p.kv_bytes_per_token for p in by_dtype.values()} == {24 * 2 * 2 * (64 + 4)}
    wide = {p.dtype: p for p in plan(config, limits, 64 << 30)}
    tight = wide["bfloat16"].weight_bytes + PROCESS_BYTES + 100 * 12288
    assert plan(config, limits, tight, kv_cache_dtype="int8")[0].max_context == 100 * 12288 // 6528 == 188
    assert wide["float32"].decode_tokens_per_second < by_dtype["float32"].decode_tokens_per_second
    with pytest.raises(ValueError, match="kv_cache_dtype must be 'auto'.*int8; got 'int4'"):
        plan(config, limits, tight, kv_cache_dtype="int4")


def test_a_plan_refuses_texts_beyond_the_positions():
    with pytest.raises(ValueError, match="40000 tokens are more than this model has positions for: 32768"):
        plan(SHAPES["qwen2.5-0.5b"], Limits("avx2", 2, 10.0, 100.0), 64 << 30, context=40000)
    with pytest.raises(ValueError, match="at least 1"):
        plan(SHAPES["qwen2.5-0.5b"], Limits("avx2", 2, 10.0, 100.0), 64 << 30, batch=0)


def costs_of(name: str, **changes) -> Costs:
    model_class, config = read_config(SHAPES[name] | changes)
    return Costs.of(model_class(config, torch.bfloat16, native), torch.bfloat16)


# Multiply-adds of the layers for one token, of the head, bytes of cache for one token, operations of attention for one
# pair.
BY_HAND = {
    # 24 layers: q and o 896 x 896, k and v 128 x 896, gate, up and down 4864 x 896. 2 key heads of 64, 14 query heads.
    "qwen2.5-0.5b": (24 * (2 * 802_816 + 2 * 114_688 + 3 * 4_358_144), 151_936 * 896, 24 * 2 * (64 + 64) * 2,
                     24 * 14 * 4 * 64),
    # 16 layers: q and o 2048 x 2048, k and v 512 x 2048, gate, up and down 8192 x 2048. 8 key heads of 64, 32 query
    # heads.
    "llama-3.2-1b": (16 * (2 * 4_194_304 + 2 * 1_048_576 + 3 * 16_777_216), 128_256 * 2048, 16 * 8 * (64 + 64) * 2,
                     16 * 32 * 4 * 64),
    # 28 layers: q, k, v and o 4096 x 4096, an MLP of two 16384 x 4096. 16 heads of 256.
    "gpt-j-6b": (28 * (4 * 16_777_216 + 2 * 67_108_864), 50_400 * 4096, 28 * 16 * (256 + 256) * 2, 28 * 16 * 4 * 256),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_costs_of_known_models_by_hand(name):
    layers, head, kv_bytes, pair_flops = BY_HAND[name]
    costs = costs_of(name)
    assert (costs.layer_flops_per_token, costs.head_flops) == (2 * layers, 2 * head)
    assert (costs.kv_bytes_per_token, costs.decode_attention_flops(1)) == (kv_bytes, pair_flops)
    assert costs.head_bytes == pytest.approx(2 * head, rel=1e-3)
    assert costs.decode_weight_bytes == pytest.approx(2 * (layers + head), rel=1e-3)  # norms and biases are the rest
    embedding = 50_400 * 4096 if name == "gpt-j-6b" else 0
    assert costs.weight_bytes - costs.decode_weight_bytes == pytest.approx(2 * embedding, rel=1e-3)


REACHED = Efficiency(weights=0.5, products=0.8, cache=0.4, decode_attention=0.2, prefill_attention=0.5)
LIMITS = Limits("avx2", 2, 10.0, 100.0)
"""With the shares: 5 GB/s of weights, 80 GFLOPS of products, 4 GB/s of cache, 20 and 50 GFLOPS of attention."""


def test_layers_and_head_reach_shares_of_their_own():
    """Files may have layers in four bits and a large tied embedding in eight bits."""
    model = tiny_llama(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=4096)
    model.quantize(QuantizationConfig("int4", group=32, embedding="int8"))
    costs = Costs.of(model, torch.bfloat16)
    assert (costs.code, costs.layer_code, costs.head_code) == ("int8", "int4", "int8")
    layers, head = efficiencies("avx2", torch.bfloat16, costs)
    assert (layers, head) == (AVX2_CODES["int4"], AVX2_CODES["int8"])
    told = predict(costs, layers, LIMITS, 512, 512, head=head)
    layer_seconds = 512 * costs.layer_flops_per_token / (layers.products * 1e11)
    head_seconds = costs.head_bytes / (head.weights * 1e10)
    attention = costs.prefill_attention_flops(512) / (layers.prefill_attention * 1e11)
    assert told.prefill_seconds == pytest.approx(layer_seconds + head_seconds + attention)
    read = (costs.decode_weight_bytes - costs.head_bytes) / layers.weights + costs.head_bytes / head.weights
    attention = costs.kv_bytes(512) / (layers.cache * 1e10)
    assert told.step_seconds == pytest.approx(read / 1e10 + attention, rel=0.01)


@pytest.mark.parametrize("name", BY_HAND)
def test_predictions_by_hand(name):
    layers, head, kv_bytes, pair_flops = BY_HAND[name]
    costs = costs_of(name)
    told = predict(costs, REACHED, LIMITS, prompt=1000, context=2000)
    prefill = (
        1000 * 2 * layers / 80e9 + 500_500 * pair_flops / 50e9 + 2 * head / 5e9
    )  # the head's matrix is read for one row
    assert told.prefill_seconds == pytest.approx(prefill, rel=1e-3)
    assert told.step_seconds == pytest.approx(
        2 * (layers + head) / 5e9 + 2000 * max(kv_bytes / 4e9, pair_flops / 20e9), rel=1e-3
    )
    # 3 tokens: reading the layers' weights takes longer than the products
    assert predict(costs, REACHED, LIMITS, 3, 3).prefill_seconds == pytest.approx(
        2 * (layers + head) / 5e9 + 6 * pair_flops / 50e9, rel=2e-3
    )
    # a batch of 32: products take longer than reading the weights
    told = predict(costs, REACHED, LIMITS, 1000, 2000, batch=32)
    assert told.step_seconds == pytest.approx(
        32 * (2 * (layers + head) / 80e9 + 2000 * max(kv_bytes / 4e9, pair_flops / 20e9)), rel=1e-3
    )


def test_the_slower_of_reading_the_cache_and_multiplying_counts():
    costs = costs_of("qwen2.5-0.5b")  # 7 operations per byte

    def later(reached: Efficiency) -> float:
        """Seconds that a step takes longer after 30,000 tokens than after 10,000."""
        short, long = (predict(costs, reached, LIMITS, 10, context).step_seconds for context in (10_000, 30_000))
        return long - short

    at = {reached.cache: later(reached) for reached in (REACHED, Efficiency(0.5, 0.8, 0.01, 0.2, 0.5))}
    assert at[0.4] == pytest.approx(20_000 * 86_016 / 20e9) and at[0.01] == pytest.approx(20_000 * 12_288 / 0.1e9)


def test_a_chunk_is_what_its_last_token_sees():
    chunks = AttentionCosts(1, 1, 8, chunked=True)
    seen = [position % 8 + 1 for position in range(20)]
    assert [chunks.visible(position + 1) for position in range(20)] == seen
    assert [chunks.pairs(tokens) for tokens in (0, 5, 8, 20)] == [sum(seen[:tokens]) for tokens in (0, 5, 8, 20)]


def windows(costs: Costs) -> tuple[int | None, ...]:
    return tuple(layer.window for layer in costs.attention)


def test_layers_with_a_window_see_no_further():
    full, half = costs_of("mistral-7b"), costs_of("mistral-7b", sliding_window=100)
    assert windows(full) == (None,) * 32 and windows(half) == (100,) * 32
    assert half.kv_bytes_per_token == full.kv_bytes_per_token
    kept = 100 + STEP_TOKENS + 28  # enough for every alignment to blocks
    assert half.cached_bytes(90) == full.cached_bytes(90) and full.cached_bytes(5000) == 5000 * full.kv_bytes_per_token
    assert half.cached_bytes(5000) == half.cached_bytes(700) == kept * half.kv_bytes_per_token
    assert (half.kv_bytes_per_late_token, full.kv_bytes_per_late_token) == (0, full.kv_bytes_per_token)
    assert half.decode_bytes(2, 90) == full.decode_bytes(2, 90)
    assert half.decode_bytes(2, 5000) == full.decode_bytes(2, 100)
    assert half.decode_attention_flops(5000) == full.decode_attention_flops(100)
    pairs = sum(min(position + 1, 100) for position in range(250))
    of_pair = full.decode_attention_flops(1)
    assert half.prefill_flops(250) - full.prefill_flops(250) == (pairs - 250 * 251 // 2) * of_pair
    mixed = costs_of("qwen2.5-0.5b", use_sliding_window=True, sliding_window=100, max_window_layers=18)
    assert windows(mixed) == (None,) * 18 + (100,) * 6
    assert mixed.kv_bytes(1000) == 12_288 * (18 * 1000 + 6 * 100) // 24
    halves = costs_of("qwen2.5-0.5b", use_sliding_window=True, sliding_window=100, max_window_layers=12)
    assert halves.cached_bytes(1000) == 12_288 * (1000 + kept) // 2
    assert halves.kv_bytes_per_late_token == 12_288 // 2
    assert mixed.cached_bytes(1) == 12_288 * 27 // 24, "in three groups, of which one has 6 layers and room for 9"


def test_a_plan_counts_what_windows_give_back():
    config, limits = SHAPES["qwen2.5-0.5b"], Limits("avx2", 2, 10.0, 100.0)
    windows = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 12}
    plans = [plan(config | more, limits, 64 << 30)[0] for more in ({}, windows)]
    assert [p.kv_bytes_per_token for p in plans] == [12_288] * 2
    assert [p.kv_bytes_per_late_token for p in plans] == [12_288, 6144]
    tight = plans[0].weight_bytes + PROCESS_BYTES + 9000 * 12_288
    lengths = [plan(config | more, limits, tight)[0].max_context for more in ({}, windows)]
    assert lengths == [9000, 2 * 9000 - (100 + STEP_TOKENS + 28)]


def test_every_instruction_set_has_its_shares():
    assert efficiency("avx2", torch.bfloat16) is efficiency("generic", torch.float16) is AVX2
    for isa, dtype in [("avx512", torch.bfloat16), ("avx512_vnni", torch.float32), ("amx", torch.float16),
                       ("avx2_vnni", torch.bfloat16), ("avx2_vnni_evex", torch.float32)]:  # fmt: skip
        assert efficiency(isa, dtype) is AVX2
    assert efficiency("avx512_bf16", torch.bfloat16) is efficiency("amx", torch.bfloat16) is AVX512_BF16
    for code in VNNI_CODES:
        for isa, shares in [("avx2", AVX2_CODES), ("avx512", AVX2_CODES), ("avx2_vnni", AVX2_VNNI_CODES),
                            ("avx512_vnni", VNNI_CODES), ("amx", VNNI_CODES)]:  # fmt: skip
            assert efficiency(isa, torch.bfloat16, code) is shares[code]
    assert inspect.signature(Scheduler).parameters["max_tokens_per_step"].default == STEP_TOKENS


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_shares(name):
    model_class, config = read_config(SHAPES["llama-3.2-1b"])
    model = model_class(config, torch.bfloat16, native)
    model.quantize(QuantizationConfig(name))
    code = Costs.of(model, torch.bfloat16).layer_code  # the head may have more bytes
    assert code == FORMATS[name]().layout.code
    for isa in ("generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"):
        assert 0 < efficiency(isa, torch.bfloat16, code).weights <= 1


def test_mapped_experts_are_planned_for(tmp_path):
    save_tiny(tmp_path, "qwen3_moe", {"num_experts_per_tok": 2})  # of 8
    config = read_config_json(tmp_path)
    limits = Limits("avx2", 2, 20.0, 150.0)
    model = load_model(LoadOptions(tmp_path, quantization="int4", progress=False))
    experts = sum(stack.stack.nbytes for stack in model.stacks())
    rest = model.nbytes - experts + PROCESS_BYTES + model.kv_spec.position_bytes * 16

    def planned(available, batch=1, **options):
        [*plans] = plan(config, limits, available, 16, batch=batch, **options)
        return {found.dtype: found.mapped for found in plans}

    int4 = {"quantization": QuantizationConfig("int4")}
    [half] = planned(rest + experts // 2, **int4).values()
    assert (half.expert_bytes, half.bytes_in_memory, half.fits) == (experts, experts // 2, True)
    assert half.bytes_read_per_token == experts * 2 // 8 // 2
    [all_of_it] = planned(rest + 2 * experts, **int4).values()
    assert (all_of_it.bytes_in_memory, all_of_it.bytes_read_per_token) == (experts, 0)
    [none] = planned(rest - 1, **int4).values()
    assert (none.bytes_in_memory, none.bytes_read_per_token, none.fits) == (0, experts * 2 // 8, False)
    kv = model.kv_spec.position_bytes * 16
    [two] = planned(rest + kv, batch=2, **int4).values()
    assert two.bytes_read_per_token == round(experts * (1 - (6 / 8) ** 2) / 2)
    assert {name for name, mapped in planned(1 << 40).items() if mapped} == {"int8", "int4"}
