"""Families with layers that keep a state, in the form of `variants.py`."""

from __future__ import annotations

from typing import Any

# The output of a delta rule is normalised. After the first token it is the product of a query and a key, whose terms
# may cancel. The norm then magnifies their rounding, in transformers up to the tolerance. A larger epsilon bounds this.
DELTA = {
    "rms_norm_eps": 1e-3, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
}  # fmt: skip
GATED = {**DELTA, "num_key_value_heads": 2, "head_dim": 24, "layer_types": ["linear_attention", "full_attention"]}
MIXTURE = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip

KIMI_DELTA = {
    "pad_token_id": 0, "eos_token_id": 2, "rms_norm_eps": 1e-3, "num_key_value_heads": 4, "kv_lora_rank": 20,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14,
    "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}  # fmt: skip

HYBRID_BASE: dict[str, dict[str, Any]] = {
    "lara_mini": {
        **DELTA, **MIXTURE, "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 7,
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        "eos_token_id": 2,
    },
    "lfm2": {"num_key_value_heads": 2, "block_multiple_of": 8, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        "num_key_value_heads": 2, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_dense_layers": 1,
    },
    "lfm3": {
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 7,
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "pad_token_id": 0, "eos_token_id": 2,
    },
    "qwen3_next": {**GATED, **MIXTURE},
    "qwen3_5_text": GATED,
    "qwen3_5": GATED,
    "qwen3_5_moe_text": {**GATED, **MIXTURE},
    "kimi_linear": {**KIMI_DELTA, "linear_num_heads": 3, "linear_head_dim": 20},
    "bailing_hybrid": {**KIMI_DELTA, "head_dim": 20, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    "olmo_hybrid": {**DELTA, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2},
}  # fmt: skip

HYBRID_ROUTED = ("bailing_hybrid", "kimi_linear", "lara_mini", "lfm2_moe", "qwen3_next", "qwen3_5_moe_text")
"""The model_types with experts."""

SECTIONS = {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip

HYBRIDS: list[tuple[str, str, dict[str, Any]]] = [
    ("lara_mini", "default", {}),
    ("lara_mini", "usual-untied", {
        "layer_types": None, "num_hidden_layers": 5, "norm_topk_prob": False, "tie_word_embeddings": False,
    }),
    ("lfm2", "default", {}),
    ("lfm2", "biases", {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False}),
    ("lfm2", "indices", {"layer_types": None, "full_attn_idxs": [0], "block_ff_dim": 60, "norm_eps": 0.1}),
    ("lfm2", "width-as-given", {"block_auto_adjust_ff_dim": False, "conv_L_cache": 1}),
    ("lfm2_moe", "default", {}),
    ("lfm2_moe", "without-bias", {"use_expert_bias": False, "norm_topk_prob": False}),
    ("lfm2_moe", "scaled", {"num_dense_layers": 0, "routed_scaling_factor": 2.0}),
    ("lfm3", "default", {}),
    ("lfm3", "plain", {"use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True}),
    ("lfm3", "usual", {"layer_types": None, "num_hidden_layers": 5, "conv_bias": True, "tie_word_embeddings": False}),
    ("qwen3_next", "default", {}),
    ("qwen3_next", "biases", {"attention_bias": True, "mlp_only_layers": [0], "linear_num_key_heads": 6}),
    ("qwen3_next", "not-normalised", {"norm_topk_prob": False, "linear_conv_kernel_dim": 2}),
    ("qwen3_5_text", "default", {}),
    ("qwen3_5_text", "tied", {"tie_word_embeddings": True, "linear_num_key_heads": 1, "linear_value_head_dim": 32}),
    ("qwen3_5_text", "intervals", {"layer_types": None, "num_hidden_layers": 4, "rope_parameters": SECTIONS}),
    ("qwen3_5", "text", {}),
    ("qwen3_5_moe_text", "default", {}),
    ("kimi_linear", "default", {}),
    ("kimi_linear", "groups", {"n_group": 4, "topk_group": 2, "q_lora_rank": 24, "mlp_layer_types": ["sparse"] * 2}),
    ("kimi_linear", "lists", {
        "layer_types": None, "num_hidden_layers": 3,
        "linear_attn_config": {
            "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 2, "short_conv_kernel_size": 3,
        },
    }),
    ("bailing_hybrid", "default", {}),
    ("bailing_hybrid", "unbounded", {"kda_safe_gate": False, "q_lora_rank": 24, "short_conv_kernel_size": 3}),
    ("bailing_hybrid", "groups", {"layer_types": None, "layer_group_size": 3, "num_hidden_layers": 3}),
    ("olmo_hybrid", "default", {"layer_types": ["linear_attention", "full_attention"]}),
    ("olmo_hybrid", "unrotated", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    ("olmo_hybrid", "positive", {"linear_allow_neg_eigval": False, "linear_key_head_dim": None, "hidden_size": 64}),
]  # fmt: skip
