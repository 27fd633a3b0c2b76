"""Known model shapes by name, and random weights for them: benchmarks run without a download.

Speed does not depend on the values of the weights, so random ones of a trained scale are as good as real ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from pace.llm.models.base_model import BaseModelForCausalLM

# fmt: off
_SWIGLU = dict(hidden_act="silu", rms_norm_eps=1e-6)
_LLAMA = _SWIGLU | dict(architectures=["LlamaForCausalLM"], model_type="llama", rms_norm_eps=1e-5)
_LLAMA3 = _LLAMA | dict(vocab_size=128256, rope_theta=5e5, max_position_embeddings=131072)
_MIXTRAL = _LLAMA | dict(architectures=["MixtralForCausalLM"], model_type="mixtral", vocab_size=32000, rope_theta=1e6,
                         max_position_embeddings=32768)
_MISTRAL = _MIXTRAL | dict(architectures=["MistralForCausalLM"], model_type="mistral", vocab_size=32768,
                           sliding_window=None)
_QWEN2 = _SWIGLU | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=151936, rope_theta=1e6,
                        max_position_embeddings=32768)
_QWEN3 = _QWEN2 | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128,
                       max_position_embeddings=40960)
_QWEN3_MOE = _QWEN3 | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", norm_topk_prob=True,
                           max_position_embeddings=262144)
_GEMMA = dict(head_dim=256, query_pre_attn_scalar=256, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh")
_GEMMA2 = _GEMMA | dict(architectures=["Gemma2ForCausalLM"], model_type="gemma2", vocab_size=256000,
                        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096,
                        max_position_embeddings=8192)
_GEMMA3 = _GEMMA | dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", rope_theta=1e6,
                        rope_local_base_freq=1e4, sliding_window_pattern=6)
_GEMMA4 = dict(architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", vocab_size=262144, head_dim=256,
               global_head_dim=512, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh",
               final_logit_softcapping=30.0)
_YARN_OF_GPT_OSS = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                        original_max_position_embeddings=4096)
_QWEN35 = _SWIGLU | dict(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", vocab_size=248320,
                         head_dim=256, full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32,
                         linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
                         rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
                         max_position_embeddings=262144)
_QWEN_VISION = dict(depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, patch_size=16, in_channels=3,
                    spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304,
                    hidden_act="gelu_pytorch_tanh")
_LATENT = _SWIGLU | dict(kv_lora_rank=512, qk_rope_head_dim=64, first_k_dense_replace=1, n_routed_experts=64)


def _scaled(factor: float) -> dict[str, Any]:
    return dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192)


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool) -> dict[str, Any]:
    return dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, tie_word_embeddings=tied)


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return dict(architectures=["OPTForCausalLM"], model_type="opt", hidden_size=hidden, ffn_dim=4 * hidden,
                num_hidden_layers=layers, num_attention_heads=heads, vocab_size=50272, max_position_embeddings=2048,
                word_embed_proj_dim=hidden, activation_function="relu", do_layer_norm_before=True)


def _kinds(layers: int, usual: str, other: str, others: tuple[int, ...]) -> list[str]:
    return [other if layer in others else usual for layer in range(layers)]


# Source: the config.json of each model on the Hub.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _LLAMA | _sizes(576, 1536, 30, 9, 3, True)
        | dict(vocab_size=49152, rope_theta=1e5, max_position_embeddings=8192),
    "smolvlm-500m": _LLAMA | _sizes(960, 2560, 32, 15, 5, False)
        | dict(architectures=["SmolVLMForConditionalGeneration"], model_type="smolvlm", vocab_size=49280,
               rope_theta=1e5, max_position_embeddings=8192, image_token_id=49190, scale_factor=4,
               vision_config=dict(hidden_size=768, image_size=512, num_attention_heads=12, patch_size=16)),
    "tinyllama-1.1b": _LLAMA | _sizes(2048, 5632, 22, 32, 4, False)
        | dict(vocab_size=32000, rope_theta=1e4, max_position_embeddings=2048),
    "llama-3.2-1b": _LLAMA3 | _sizes(2048, 8192, 16, 32, 8, True) | dict(head_dim=64, rope_scaling=_scaled(32.0)),
    "llama-3.2-3b": _LLAMA3 | _sizes(3072, 8192, 28, 24, 8, True) | dict(head_dim=128, rope_scaling=_scaled(32.0)),
    "llama-3.1-8b": _LLAMA3 | _sizes(4096, 14336, 32, 32, 8, False) | dict(rope_scaling=_scaled(8.0)),
    "qwen2.5-0.5b": _QWEN2 | _sizes(896, 4864, 24, 14, 2, True),
    "qwen2.5-1.5b": _QWEN2 | _sizes(1536, 8960, 28, 12, 2, True),
    "qwen2.5-3b": _QWEN2 | _sizes(2048, 11008, 36, 16, 2, True),
    "qwen2.5-7b": _QWEN2 | _sizes(3584, 18944, 28, 28, 4, False) | dict(vocab_size=152064),
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": _QWEN3 | _sizes(2048, 6144, 28, 16, 8, True),
    "qwen3-4b": _QWEN3 | _sizes(2560, 9728, 36, 32, 8, True),
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32, 8, False),
    "qwen3-vl-2b": _QWEN3 | _sizes(2048, 6144, 28, 16, 8, True)
        | dict(architectures=["Qwen3VLForConditionalGeneration"], model_type="qwen3_vl", rope_theta=5e6,
               max_position_embeddings=262144, image_token_id=151655,
               vision_config=_QWEN_VISION | dict(out_hidden_size=2048, deepstack_visual_indexes=[5, 11, 17])),
    "qwen3-30b-a3b": _QWEN3_MOE | _sizes(2048, 6144, 48, 32, 4, False)
        | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
    "mixtral-8x7b": _MIXTRAL | _sizes(4096, 14336, 32, 32, 8, False) | dict(num_local_experts=8, num_experts_per_tok=2),
    "gpt-oss-20b": _sizes(2880, 2880, 24, 64, 8, False)
        | dict(architectures=["GptOssForCausalLM"], model_type="gpt_oss", vocab_size=201088, head_dim=64,
               rope_theta=150000.0, rope_scaling=_YARN_OF_GPT_OSS, rms_norm_eps=1e-5, sliding_window=128,
               max_position_embeddings=131072, num_local_experts=32, num_experts_per_tok=4),
    "deepseek-v2-lite": _LATENT | _sizes(2048, 10944, 27, 16, 16, False)
        | dict(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", vocab_size=102400,
               max_position_embeddings=163840, q_lora_rank=None, qk_nope_head_dim=128, v_head_dim=128,
               num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408),
    "glm-4.7-flash": _LATENT | _sizes(2048, 10240, 47, 20, 20, False)
        | dict(architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite", vocab_size=154880, rope_theta=1e6,
               rms_norm_eps=1e-5, max_position_embeddings=202752, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256,
               num_experts_per_tok=4, n_shared_experts=1, moe_intermediate_size=1536),
    "gemma-2-2b": _GEMMA2 | _sizes(2304, 9216, 26, 8, 4, True),
    "gemma-2-9b": _GEMMA2 | _sizes(3584, 14336, 42, 16, 8, True),
    "gemma-3-1b": _GEMMA3 | _sizes(1152, 6912, 26, 4, 1, True)
        | dict(vocab_size=262144, sliding_window=512, max_position_embeddings=32768),
    "gemma-3-4b": _GEMMA3 | _sizes(2560, 10240, 34, 8, 4, True)
        | dict(vocab_size=262208, sliding_window=1024, max_position_embeddings=131072,
               rope_scaling=dict(rope_type="linear", factor=8.0)),
    "gemma-3-4b-vl": _GEMMA3 | _sizes(2560, 10240, 34, 8, 4, True)
        | dict(architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", vocab_size=262208,
               sliding_window=1024, max_position_embeddings=131072, rope_scaling=dict(rope_type="linear", factor=8.0),
               vision_config=dict(hidden_size=1152, image_size=896, intermediate_size=4304, num_attention_heads=16,
                                  num_hidden_layers=27, patch_size=14)),
    "gemma-4-e2b": _GEMMA4 | _sizes(1536, 6144, 35, 8, 1, True)
        | dict(sliding_window=512, max_position_embeddings=131072, num_kv_shared_layers=20, use_double_wide_mlp=True,
               layer_types=_kinds(35, "sliding_attention", "full_attention", tuple(range(4, 35, 5)))),
    "gemma-4-26b-a4b": _GEMMA4 | _sizes(2816, 2112, 30, 16, 8, True)
        | dict(sliding_window=1024, max_position_embeddings=262144, hidden_size_per_layer_input=0,
               attention_k_eq_v=True, num_global_key_value_heads=2, enable_moe_block=True, num_experts=128,
               top_k_experts=8, moe_intermediate_size=704),
    "qwen3.5-0.8b": _QWEN35 | _sizes(1024, 3584, 24, 8, 2, True) | dict(linear_num_value_heads=16),
    "qwen3.5-4b": _QWEN35 | _sizes(2560, 9216, 32, 16, 4, True),
    # The tower is that of Qwen3-VL-4B without deepstack; its published sizes are not at hand.
    "qwen3.5-4b-vl": _QWEN35 | _sizes(2560, 9216, 32, 16, 4, True)
        | dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", image_token_id=248056,
               vision_config=_QWEN_VISION | dict(out_hidden_size=2560)),
    "qwen3.6-35b-a3b": _QWEN35
        | dict(architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", hidden_size=2048,
               num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=False,
               num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512),
    "lfm2-1.2b": _sizes(2048, 12288, 16, 32, 8, True)
        | dict(architectures=["Lfm2ForCausalLM"], model_type="lfm2", vocab_size=65536, norm_eps=1e-5, rope_theta=1e6,
               max_position_embeddings=128000, layer_types=_kinds(16, "conv", "full_attention", (2, 5, 8, 10, 12, 14)),
               conv_L_cache=3, conv_bias=False, block_ff_dim=12288, block_auto_adjust_ff_dim=True,
               block_ffn_dim_multiplier=1.0, block_multiple_of=256),
    "lfm2-vl-450m": _sizes(1024, 6656, 16, 16, 8, True)
        | dict(architectures=["Lfm2VlForConditionalGeneration"], model_type="lfm2_vl", vocab_size=65536, norm_eps=1e-5,
               rope_theta=1e6, max_position_embeddings=128000, image_token_id=396, downsample_factor=2,
               layer_types=_kinds(16, "conv", "full_attention", (2, 5, 8, 10, 12, 14)), conv_L_cache=3, conv_bias=False,
               block_ff_dim=6656, block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0, block_multiple_of=256,
               projector_hidden_size=2560,
               vision_config=dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_patches=256)),
    "granite-4-h-tiny": _sizes(1536, 512, 40, 12, 4, True)
        | dict(architectures=["GraniteMoeHybridForCausalLM"], model_type="granitemoehybrid", vocab_size=100352,
               hidden_act="silu", rms_norm_eps=1e-5, rope_theta=1e4, position_embedding_type="nope",
               max_position_embeddings=131072, layer_types=_kinds(40, "mamba", "attention", (5, 15, 25, 35)),
               num_local_experts=64, num_experts_per_tok=6, shared_intermediate_size=1024, mamba_n_heads=48,
               mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2,
               mamba_conv_bias=True, mamba_proj_bias=False, embedding_multiplier=12, residual_multiplier=0.22,
               attention_multiplier=0.0078125, logits_scaling=6),
    "nemotron-3-nano": _sizes(2688, 1856, 52, 32, 2, False)
        | dict(architectures=["NemotronHForCausalLM"], model_type="nemotron_h", vocab_size=131072, head_dim=128,
               layer_norm_epsilon=1e-5, mlp_hidden_act="relu2", max_position_embeddings=262144,
               hybrid_override_pattern="MEMEM*E" * 5 + "MEMEMEM*E" + "ME" * 4, mamba_num_heads=64, mamba_head_dim=64,
               ssm_state_size=128, n_groups=8, conv_kernel=4, mamba_hidden_act="silu", use_conv_bias=True,
               n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=6, moe_intermediate_size=1856,
               moe_shared_expert_intermediate_size=3712, norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1,
               topk_group=1),
    "mistral-7b": _MISTRAL | _sizes(4096, 14336, 32, 32, 8, False),
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "phi-2": dict(architectures=["PhiForCausalLM"], model_type="phi", hidden_size=2560, intermediate_size=10240,
                  num_hidden_layers=32, num_attention_heads=32, vocab_size=51200, max_position_embeddings=2048,
                  partial_rotary_factor=0.4, rope_theta=1e4, layer_norm_eps=1e-5, hidden_act="gelu_new"),
    "gpt-j-6b": dict(architectures=["GPTJForCausalLM"], model_type="gptj", n_embd=4096, n_layer=28, n_head=16,
                     n_positions=2048, rotary_dim=64, vocab_size=50400, activation_function="gelu_new",
                     tie_word_embeddings=False),
}
# fmt: on


def shape_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """Returns the config.json of a shape, or of its first `layers` layers with its embedding and head. Raises
    ValueError for more layers than it has."""
    config = SHAPES[name]
    if layers is None:
        return config
    field = next(field for field in ("num_hidden_layers", "n_layer") if field in config)
    if not 1 <= layers <= config[field]:
        raise ValueError(f"{name} has 1 to {config[field]} layers; got {layers}")
    kinds = {name: config[name][:layers] for name in ("layer_types", "hybrid_override_pattern") if name in config}
    if shared := config.get("num_kv_shared_layers"):
        kinds["num_kv_shared_layers"] = max(0, shared - config[field] + layers)
    return config | kinds | {field: layers}


@contextmanager
def hint_of_shape(name: str) -> Iterator[None]:
    """Adds similarly named shapes to the error if no checkpoint of this name is found."""
    try:
        yield
    except FileNotFoundError as error:
        close = difflib.get_close_matches(name.lower(), SHAPES, n=3)
        if not close:
            raise
        raise FileNotFoundError(f"{error}; did you mean the shape {' or '.join(map(repr, close))}?") from error


class RandomWeights:
    """A checkpoint (a `TensorReader`) with random numbers for every tensor of a model. Nothing is kept in memory."""

    PIECE_ELEMENTS = 1 << 22

    def __init__(self, model: BaseModelForCausalLM) -> None:
        self.tensors = {name: (torch.bfloat16, targets[0].shape) for name, targets in model.targets().items()}
        generator = torch.Generator().manual_seed(0)
        self._numbers = torch.randn(self.PIECE_ELEMENTS, generator=generator).mul_(0.02).bfloat16()

    def row_ranges(self, name: str) -> list[tuple[int, int]]:
        *lead, columns = self.tensors[name][1]
        if not lead:
            return [(0, columns)]
        count, rows = prod(lead), max(1, self.PIECE_ELEMENTS // columns)
        return [(start, min(start + rows, count)) for start in range(0, count, rows)]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Returns normal numbers with a standard deviation of 0.02 (the usual initialiser_range), or ones for the
        weights of norms and for factors."""
        _, shape = self.tensors[name]
        rows = (prod(shape[:-1] or shape) if stop is None else stop) - start
        if len(shape) == 1:
            is_factor = name.endswith(("weight", "scalar", "scale"))
            return torch.ones(rows, dtype=torch.bfloat16) if is_factor else self._numbers[:rows]
        count = rows * shape[-1]
        numbers = (
            self._numbers if count <= self.PIECE_ELEMENTS else self._numbers.repeat(-(-count // self.PIECE_ELEMENTS))
        )
        return numbers[:count].view(rows, shape[-1])

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        pass

    def keep(self, name: str) -> None:
        pass
