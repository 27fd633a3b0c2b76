"""Published configs are read correctly, and none is refused for a field of its publisher."""

from __future__ import annotations

import re

import pytest
import torch

from pace.llm.models.families.ernie4_5_moe import Ernie4_5_MoeForCausalLM
from pace.llm.models.model_list import read_config
from pace.ops import reference
from pace.ops.experts import Router
from tests.llm.models.published.published_configs import PUBLISHED
from tests.llm.models.published.published_dense import DENSE
from tests.llm.models.published.published_mixtures import MIXTURES
from tests.plugins.tiers import sample

ALL = PUBLISHED | DENSE | MIXTURES
DEEPSEEK_V3 = Router(
    256, 8, "sigmoid", normalise=True, eps=1e-20, scale=2.5, groups=8, kept_groups=4, group_score="top2"
)
ROUTERS = {
    "DeepSeek-V3": DEEPSEEK_V3, "DeepSeek-V2": Router(160, 6, groups=8, kept_groups=3, scale=16.0),
    "DeepSeek-V2-Lite": Router(64, 6),
    "Kimi-K2-Instruct": Router(384, 8, "sigmoid", normalise=True, eps=1e-20, scale=2.827, group_score="top2"),
    "Kimi-K2-Thinking": Router(384, 8, "sigmoid", normalise=True, eps=1e-20, scale=2.827, group_score="top2"),
    "Llama-4-Maverick-17B-128E-Instruct": Router(128, 1, "sigmoid_of_chosen"),
    "GLM-4.5-Air": Router(128, 8, "sigmoid", normalise=True, eps=1e-20, group_score="top2"),
    "Qwen3-30B-A3B-Instruct-2507": Router(128, 8, normalise=True),
    "Qwen3-Coder-30B-A3B-Instruct": Router(128, 8, normalise=True), "Qwen1.5-MoE-A2.7B-Chat": Router(60, 4),
    "gpt-oss-20b": Router(32, 4, "softmax_of_chosen"), "Mixtral-8x7B-Instruct-v0.1": Router(8, 2, normalise=True),
    "OLMoE-1B-7B-0924": Router(64, 8), "granite-3.1-1b-a400m-instruct": Router(32, 8, "softmax_of_chosen"),
    "ERNIE-4.5-21B-A3B-PT": Router(64, 6, normalise=True, least_sum=1e-12),
    "Hunyuan-A13B-Instruct": Router(64, 8, normalise=True),
    "Phi-3.5-MoE-instruct": Router(16, 2, "sparsemixer", jitter=0.01),
    "Llama-4-Scout-17B-16E-Instruct": Router(16, 1, "sigmoid_of_chosen"),
    "gemma-4-26B-A4B-it": Router(128, 8, normalise=True),
    "Kimi-K2.5": Router(384, 8, "sigmoid", normalise=True, eps=1e-20, scale=2.827, group_score="top2"),
    "Laguna-XS-2.1": Router(256, 8, "sigmoid", normalise=True, scale=2.5, group_score="top2"),
    "Ling-mini-2.0": DEEPSEEK_V3, "MiniMax-M2": Router(256, 8, "sigmoid", normalise=True, group_score="top2"),
    "Trinity-Mini": Router(128, 8, "sigmoid", normalise=True, eps=1e-20, scale=2.826, group_score="top2"),
}  # fmt: skip

WINDOWS = {
    "gpt-oss-20b": [128, None, 128, None, 128, None], "gemma-2-2b-it": [4096, None, 4096, None, 4096, None],
    "gemma-4-E2B-it": [512, 512, 512, 512, None, 512], "gemma-4-E4B-it": [512, 512, 512, 512, 512, None],
    "gemma-4-12B-it": [1024, 1024, 1024, 1024, 1024, None],
    "gemma-3-4b-it": [1024, 1024, 1024, 1024, 1024, None], "gemma-3-270m-it": [512, 512, 512, 512, 512, None],
    "c4ai-command-r7b-12-2024": [4096, 4096, 4096, None, 4096, 4096],
    "Olmo-3-7B-Instruct": [4096, 4096, 4096, None, 4096, 4096], "starcoder2-3b": [4096] * 6,
    "starcoder2-15b": [4096] * 6, "gemma-2-27b-it": [4096, None, 4096, None, 4096, None],
    "gemma-3-1b-it": [512, 512, 512, 512, 512, None], "Qwen2.5-VL-3B-Instruct": [None] * 6, "SmolLM3-3B": [None] * 6,
    "Qwen3-30B-A3B-Instruct-2507": [None] * 6, "Qwen1.5-MoE-A2.7B-Chat": [None] * 6,
    "Mixtral-8x7B-Instruct-v0.1": [None] * 6, "Llama-4-Scout-17B-16E-Instruct": [8192, 8192, 8192, None, 8192, 8192],
    "Phi-3.5-MoE-instruct": [131072] * 6, "cwm": [None, 8192, 8192, 8192, None, 8192],
    "EXAONE-4.0-32B": [4096, 4096, 4096, None, 4096, 4096], "EXAONE-4.0-1.2B": [None] * 6,
    "Ministral-8B-Instruct-2410": [None, 32768, 32768, 32768, None, 32768],
    "Mistral-Small-3.1-24B-Instruct-2503": [None] * 6, "Ministral-3-3B-Instruct-2512": [None] * 6,
    "Trinity-Mini": [2048, 2048, 2048, None, 2048, 2048],
    "K-EXAONE-236B-A23B": [128, 128, 128, None, 128, 128], "Laguna-XS-2.1": [None, 512, 512, 512, None, 512],
}  # fmt: skip
"""Windows of the first six layers, by checkpoint."""

IGNORED = {
    "Falcon3-7B-Instruct": ["activation"],
    "stablelm-zephyr-3b": ["num_heads, rotary_scaling_factor"],
    "dolly-v2-3b": ["custom_pipelines"],
    "MiniCPM4-0.5B": ["mup_denominator"],
    "Phi-4-mini-instruct": ["full_attn_mod, interpolate_factor, lm_head_bias"],
    "SmolLM2-1.7B-Instruct": ["is_llama_config, rope_interleaved, transformers.js_config"],
}
"""Fields that a warning names, by checkpoint."""


LIKE_DEEPSEEK_V3 = ("DeepSeek-V3.1", "Kimi-K2-Thinking")
"""Large models that use the same code as DeepSeek-V3 and Kimi-K2-Instruct."""


@pytest.mark.parametrize("name", sample(list(ALL), lambda name: name not in LIKE_DEEPSEEK_V3))
def test_a_published_config_makes_a_model_without_warnings(name, caplog):
    model_class, config = read_config(ALL[name])
    model = model_class(config, torch.bfloat16, reference)
    assert len(model.layers) == config.num_hidden_layers
    assert [record.message.split(": ")[-1] for record in caplog.records] == IGNORED.get(name, [])


@pytest.mark.parametrize("name", ROUTERS)
def test_how_tokens_choose(name):
    assert read_config(ALL[name])[1].router == ROUTERS[name]


@pytest.mark.parametrize("name", WINDOWS)
def test_which_layers_have_windows(name):
    config = read_config(ALL[name])[1]
    assert [config.window(layer) for layer in range(6)] == WINDOWS[name]


def test_yarn_of_deepseek_scales_the_scores():
    """The scale is the square of 0.1 mscale log(factor) + 1. Kimi has the same number for both betas."""
    config = read_config(PUBLISHED["DeepSeek-V3"])[1]
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
    assert config.rope.attention_factor == 1.0
    kimi = read_config(PUBLISHED["Kimi-K2-Instruct"])[1]
    assert (kimi.rope.beta_fast, kimi.rope.beta_slow, kimi.rope.factor) == (1.0, 1.0, 32.0)
    assert read_config(PUBLISHED["Moonlight-16B-A3B"])[1].attention_scale == pytest.approx(192**-0.5)


def test_command_r_plus_is_as_long_as_it_was_trained():
    assert read_config(PUBLISHED["c4ai-command-r-plus"])[1].max_length == 131072


def test_hunyuans_lists_that_differ_are_refused_by_name():
    lists = {"moe_topk": [8] * 31 + [4]}
    with pytest.raises(ValueError, match="num_experts_per_tok"):
        read_config(PUBLISHED["Hunyuan-A13B-Instruct"] | lists)
    with pytest.raises(NotImplementedError, match="use_mla"):
        read_config(PUBLISHED["Hunyuan-A13B-Instruct"] | {"use_mla": True})


def test_what_predicts_further_tokens_in_ernie_is_left_out():
    model_class, config = read_config(PUBLISHED["ERNIE-4.5-21B-A3B-PT"] | {"num_hidden_layers": 2})
    left_out = model_class(config, torch.bfloat16, reference).ignored_tensors
    for name in ("model.mtp_block.0.mlp.gate.weight", "model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.0.weight"):
        assert any(re.fullmatch(pattern, name) for pattern in left_out), name
    assert model_class is Ernie4_5_MoeForCausalLM
