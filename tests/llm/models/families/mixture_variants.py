"""Mixtures of experts, in the form of `variants.py`."""

from __future__ import annotations

from typing import Any

LLAMA3_STEP = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
"""Parameters like those of Llama 4 Scout, where each frequency is either stretched or kept."""


def phi_rope(original: int, **more: Any) -> dict[str, Any]:
    """Returns a longrope rotation of four pairs with explicit scales."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    scales = {"short_mscale": 1.2, "long_mscale": 1.4, "original_max_position_embeddings": original}
    return {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **scales}, **more}


MIXTURE_BASE: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {
        "num_key_value_heads": 2,
        "moe_num_experts": 7,
        "moe_k": 3,
        "moe_intermediate_size": 24,
    },
    "glm4_moe": {
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    },
    "granitemoe": {
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "granitemoeshared": {
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 40,
    },
    "hunyuan_v1_moe": {"num_key_value_heads": 2, "num_experts": 6, "moe_topk": 2, "head_dim": 12},
    "olmoe": {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
        "num_hidden_layers": 3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "llama4_text": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 40,
        "num_local_experts": 6,
        "attention_chunk_size": 7,
        "floor_scale": 5,
        "attn_scale": 0.3,
    },
    "llama4": {"num_key_value_heads": 2, "head_dim": 12, "intermediate_size_mlp": 40, "num_local_experts": 6},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2},
    "phimoe": {"num_key_value_heads": 2, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {
        "num_key_value_heads": 2,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "qwen3_vl_moe": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
    },
}

MIXTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("ernie4_5_moe", "default", {}),
    (
        "ernie4_5_moe",
        "layers-bias",
        {"num_hidden_layers": 4, "moe_layer_interval": 2, "moe_layer_end_index": 2, "use_bias": True},
    ),
    (
        "ernie4_5_moe",
        "no-shared-untied-bias",
        {"moe_num_shared_experts": 0, "tie_word_embeddings": False, "moe_norm_min": 0.9, "use_bias": True},
    ),
    ("glm4_moe", "default", {}),
    ("glm4_moe", "groups", {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe", "all", {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 2, "head_dim": 12}),
    ("granitemoe", "default", {}),
    ("granitemoe", "tied-bias", {"tie_word_embeddings": True, "attention_bias": True}),
    ("granitemoeshared", "default", {}),
    ("granitemoeshared", "none", {"shared_intermediate_size": 0, "residual_multiplier": 0.3}),
    ("hunyuan_v1_moe", "default", {}),
    ("hunyuan_v1_moe", "lists", {"moe_topk": [3, 3], "attention_bias": True}),
    ("olmoe", "default", {}),
    ("olmoe", "clip", {"clip_qkv": 0.5}),
    ("olmoe", "normalised", {"norm_topk_prob": True, "num_key_value_heads": None}),
    ("gpt_oss", "default", {}),
    ("gpt_oss", "limit", {"swiglu_limit": 0.2, "swiglu_alpha": 1.3, "sliding_window": 9}),
    ("gpt_oss", "layer_types", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("gpt_oss", "no-bias", {"attention_bias": False, "num_experts_per_tok": 6}),
    ("llama4_text", "default", {}),
    ("llama4_text", "scout", {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3_STEP}, "num_experts_per_tok": 2}),
    ("llama4_text", "maverick", {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_chunk_size": 16}),
    ("llama4_text", "layers", {"moe_layers": [1], "no_rope_layers": [0, 1, 1, 0], "attention_bias": True}),
    ("llama4_text", "types", {"layer_types": ["full_attention", "chunked_attention"] * 2, "floor_scale": 8192}),
    (
        "llama4_text",
        "mobile",
        {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "no_rope_layers": [1] * 4,
            "layer_types": ["full_attention"] * 4,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
        },
    ),
    ("llama4", "default", {}),
    ("mixtral", "default", {}),
    ("mixtral", "window", {"sliding_window": 7, "num_experts_per_tok": 1}),
    ("phimoe", "default", {}),
    ("phimoe", "no-bias", {"attention_bias": False, "lm_head_bias": False, "router_jitter_noise": 0.3}),
    ("phimoe", "longrope-short", phi_rope(50)),
    ("phimoe", "longrope-long", phi_rope(16)),
    ("phimoe", "window", {"sliding_window": 7, "tie_word_embeddings": True, "router_jitter_noise": 0.0}),
    ("qwen2_moe", "default", {}),
    ("qwen2_moe", "normalised", {"norm_topk_prob": True, "qkv_bias": False}),
    ("qwen2_moe", "steps", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    (
        "qwen2_moe",
        "window",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    ("qwen3_moe", "default", {}),
    ("qwen3_moe", "normalised", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    ("qwen3_moe", "bias-all", {"attention_bias": True, "num_experts_per_tok": 8}),
    ("qwen3_moe", "mlp-layers", {"mlp_only_layers": [0]}),
    ("qwen3_moe", "window", {"use_sliding_window": True, "sliding_window": 9}),
    ("qwen3_vl_moe", "default", {}),
    ("qwen3_vl_moe", "mlp-layers", {"mlp_only_layers": [0], "attention_bias": True}),
]
