"""Mixtures of experts, as `variants.py` has them."""

from __future__ import annotations

from typing import Any

MIXTURE_BASE: dict[str, dict[str, Any]] = {
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
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2},
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
}

MIXTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt_oss", "default", {}),
    ("gpt_oss", "limit", {"swiglu_limit": 0.2, "swiglu_alpha": 1.3, "sliding_window": 9}),
    ("gpt_oss", "layer_types", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("gpt_oss", "no-bias", {"attention_bias": False, "num_experts_per_tok": 6}),
    ("mixtral", "default", {}),
    ("mixtral", "window", {"sliding_window": 7, "num_experts_per_tok": 1}),
    ("qwen2_moe", "default", {}),
    ("qwen2_moe", "normalised", {"norm_topk_prob": True, "qkv_bias": False}),
    ("qwen2_moe", "steps", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen2_moe", "window", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen3_moe", "default", {}),
    ("qwen3_moe", "normalised", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    ("qwen3_moe", "bias-all", {"attention_bias": True, "num_experts_per_tok": 8}),
    ("qwen3_moe", "mlp-layers", {"mlp_only_layers": [0]}),
    ("qwen3_moe", "window", {"use_sliding_window": True, "sliding_window": 9}),
]
