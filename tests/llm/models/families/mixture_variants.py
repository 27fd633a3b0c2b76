"""Mixtures of experts, in the form of `variants.py`."""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3_STEP = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
"""Parameters like those of Llama 4 Scout, where each frequency is either stretched or kept."""


def phi_rope(original: int, **more: Any) -> dict[str, Any]:
    """Returns a longrope rotation of four pairs with explicit scales."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    scales = {"short_mscale": 1.2, "long_mscale": 1.4, "original_max_position_embeddings": original}
    return {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **scales}, **more}


SMALL_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}

MIXTURE_BASE: dict[str, dict[str, Any]] = {
    "bailing_moe_v2": {
        "num_key_value_heads": 2, "head_dim": 12, "num_experts": 8, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, **SMALL_EXPERTS,
    },
    "cohere2_moe": {
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 7, "num_experts": 6,
        "num_experts_per_tok": 3, "num_shared_experts": 1, "logit_scale": 0.8,
    },
    "dbrx": {
        "d_model": 32, "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 3},
    },
    "dots1": {
        "num_key_value_heads": 2, "head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2,
        "first_k_dense_replace": 1, **SMALL_EXPERTS,
    },
    "exaone_moe": {
        "num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 7, "num_experts": 8, **SMALL_EXPERTS,
    },
    "ernie4_5_moe": {"num_key_value_heads": 2, "moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 24},
    "flex_olmo": {"num_key_value_heads": 2, "num_experts": 7, "num_experts_per_tok": 5, "pad_token_id": 0},
    "glm4_moe": {
        "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    },
    "granitemoe": {
        "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 3, "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0,
    },
    "granitemoe_swa": {
        "num_key_value_heads": 2, "num_hidden_layers": 5, "sliding_window": 7, "num_local_experts": 6,
        "num_experts_per_tok": 3, "shared_intermediate_size": 40, "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
    },
    "granitemoeshared": {
        "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 40,
    },
    "hunyuan_v1_moe": {"num_key_value_heads": 2, "num_experts": 6, "moe_topk": 2, "head_dim": 12},
    "hy_v3": {"num_key_value_heads": 2, "head_dim": 12, "num_experts": 8, **SMALL_EXPERTS},
    "olmoe": {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {
        "num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7,
        "num_hidden_layers": 3,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 16,
        },
    },
    "llama4_text": {
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 4, "intermediate_size_mlp": 40,
        "num_local_experts": 6, "attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.3,
    },
    "llama4": {"num_key_value_heads": 2, "head_dim": 12, "intermediate_size_mlp": 40, "num_local_experts": 6},
    "minimax_m2": {
        "num_key_value_heads": 2, "head_dim": 12, "rotary_dim": 6, "num_local_experts": 8, "num_experts_per_tok": 3,
    },
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2},
    "phimoe": {"num_key_value_heads": 2, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {
        "num_key_value_heads": 2, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "num_key_value_heads": 2, "head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "qwen3_vl_moe": {
        "num_key_value_heads": 2, "head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
    },
    "sarvam_moe": {"num_key_value_heads": 2, "head_dim": 12, "n_routed_experts": 8, **SMALL_EXPERTS},
    "solar_open": {"num_key_value_heads": 2, "head_dim": 12, "n_routed_experts": 8, **SMALL_EXPERTS},
}  # fmt: skip

MIXTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("ernie4_5_moe", "default", {}),
    ("ernie4_5_moe", "layers-bias", {
        "num_hidden_layers": 4, "moe_layer_interval": 2, "moe_layer_end_index": 2, "use_bias": True,
    }),
    ("ernie4_5_moe", "no-shared-untied-bias", {
        "moe_num_shared_experts": 0, "tie_word_embeddings": False, "moe_norm_min": 0.9, "use_bias": True,
    }),
    ("dbrx", "default", {}),
    ("dbrx", "not-normalised", {
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 40, "moe_num_experts": 5, "moe_top_k": 2, "moe_normalize_expert_weights": None,
            "ffn_act_fn": {"name": "gelu"},
        },
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }),
    ("flex_olmo", "default", {}),
    ("flex_olmo", "normalised", {"norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True}),
    ("glm4_moe", "default", {}),
    ("glm4_moe", "groups", {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe", "all", {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 2, "head_dim": 12}),
    ("granitemoe", "default", {}),
    ("granitemoe", "tied-bias", {"tie_word_embeddings": True, "attention_bias": True}),
    ("granitemoe_swa", "default", {}),
    ("granitemoe_swa", "bases", {"layer_rope_theta": [0, 1e4, 500.0, 0.0, 500.0], "shared_intermediate_size": 0}),
    ("granitemoeshared", "default", {}),
    ("granitemoeshared", "none", {"shared_intermediate_size": 0, "residual_multiplier": 0.3}),
    ("hunyuan_v1_moe", "default", {}),
    ("hunyuan_v1_moe", "lists", {"moe_topk": [3, 3], "attention_bias": True}),
    ("hy_v3", "default", {}),
    ("hy_v3", "types", {
        "mlp_layer_types": ["sparse", "dense"], "num_shared_experts": 2, "attention_bias": True, "mlp_bias": False,
    }),
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
    ("llama4_text", "mobile", {
        "num_local_experts": 0, "num_experts_per_tok": 0, "moe_layers": [], "interleave_moe_layer_step": 0,
        "no_rope_layers": [1] * 4, "layer_types": ["full_attention"] * 4, "attn_temperature_tuning": False,
        "tie_word_embeddings": True,
    }),
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
    ("qwen2_moe", "window", {
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2,
    }),
    ("qwen3_moe", "default", {}),
    ("qwen3_moe", "normalised", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    ("qwen3_moe", "bias-all", {"attention_bias": True, "num_experts_per_tok": 8}),
    ("qwen3_moe", "mlp-layers", {"mlp_only_layers": [0]}),
    ("qwen3_moe", "window", {"use_sliding_window": True, "sliding_window": 9}),
    ("qwen3_vl_moe", "default", {}),
    ("qwen3_vl_moe", "mlp-layers", {"mlp_only_layers": [0], "attention_bias": True}),
    ("bailing_moe_v2", "default", {}),
    ("bailing_moe_v2", "biases", {
        "use_qkv_bias": True, "use_bias": True, "use_qk_norm": False, "n_group": 1, "topk_group": 1,
        "partial_rotary_factor": 1.0,
    }),
    ("bailing_moe_v2", "one", {"num_experts_per_tok": 1, "num_shared_experts": None, "first_k_dense_replace": 0}),
    ("cohere2_moe", "default", {}),
    ("cohere2_moe", "sigmoid", {
        "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum", "num_shared_experts": 2,
    }),
    ("cohere2_moe", "rms", {
        "rms_norm_eps": 1e-3, "num_shared_experts": 0, "expert_selection_fn": "sigmoid", "norm_topk_prob": False,
        "attention_bias": True,
    }),
    ("cohere2_moe", "prefix", {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "layer_types": [FULL, SLIDING, FULL, SLIDING],
        "prefix_dense_intermediate_size": 40,
    }),
    ("cohere2_moe", "prefix-windows", {
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "tie_word_embeddings": False, "prefix_dense_sliding_window_pattern": 2,
    }),
    ("dots1", "default", {}),
    ("dots1", "groups", {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    ("dots1", "windows", {"sliding_window": 7, "max_window_layers": 1, "attention_bias": True}),
    ("dots1", "types", {"sliding_window": 7, "layer_types": [SLIDING, FULL], "first_k_dense_replace": 0}),
    ("exaone_moe", "default", {}),
    ("exaone_moe", "groups", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "sliding_window_pattern": 2}),
    ("exaone_moe", "types", {"layer_types": [FULL] * 4, "mlp_layer_types": ["sparse", "dense"] * 2, "head_dim": 20}),
    ("minimax_m2", "default", {}),
    ("minimax_m2", "all-tied", {"rotary_dim": None, "tie_word_embeddings": True, "rms_norm_eps": 0.1}),
    ("sarvam_moe", "default", {}),
    ("sarvam_moe", "bias", {"attention_bias": True, "use_qk_norm": False, "n_group": 4, "topk_group": 2}),
    ("solar_open", "default", {}),
    ("solar_open", "bias-groups", {
        "attention_bias": True, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5,
    }),
]  # fmt: skip
