"""Families with latent attention, in the form of `variants.py`."""

from __future__ import annotations

from typing import Any

SIZES = {
    "kv_lora_rank": 20, "q_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14,
}  # fmt: skip
MIXTURE = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip

INDEX = {"num_key_value_heads": 4, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 512}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
    "mscale_all_dim": 0.7,
}  # fmt: skip

LATENT_BASE: dict[str, dict[str, Any]] = {
    "axk1": {**SIZES, **MIXTURE, "num_key_value_heads": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    "deepseek_v2": {**SIZES, **MIXTURE},
    "deepseek_v3": {**SIZES, **MIXTURE, "num_key_value_heads": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {**SIZES, **MIXTURE, **INDEX, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    "glm4_moe_lite": {
        **SIZES, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4,
    },
    "glm_moe_dsa": {**SIZES, **MIXTURE, **INDEX, "n_shared_experts": 1},
    "kimi_k25": {**SIZES, **MIXTURE, "num_key_value_heads": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "minicpm3": {**SIZES, "num_key_value_heads": 4, "v_head_dim": None},
    "mistral4": {
        **SIZES, **MIXTURE, "num_key_value_heads": 4, "n_shared_experts": 1,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7},
    },
    "sarvam_mla": {**SIZES, **MIXTURE, "q_lora_rank": None, "n_shared_experts": 1},
}  # fmt: skip

GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}

LATENTS: list[tuple[str, str, dict[str, Any]]] = [
    ("axk1", "default", {}),
    ("axk1", "types", {"mlp_layer_types": ["sparse", "dense"], "rope_interleave": False, "norm_topk_prob": False}),
    ("deepseek_v2", "default", {}),
    ("deepseek_v2", "lite", {"q_lora_rank": None, "rope_parameters": YARN}),
    ("deepseek_v2", "groups", {**GROUPS, "routed_scaling_factor": 3.0}),
    ("deepseek_v2", "biases", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("deepseek_v2", "experts-everywhere", {"first_k_dense_replace": 0, "num_experts_per_tok": 8}),
    ("deepseek_v2", "mscales", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.4}}),
    ("deepseek_v3", "default", {}),
    ("deepseek_v3", "yarn", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("deepseek_v3", "not-normalised", {"norm_topk_prob": False, "routed_scaling_factor": 0.7}),
    ("deepseek_v3", "one-group", {"n_group": 1, "topk_group": 1, "q_lora_rank": None}),
    ("deepseek_v3", "halves", {"rope_interleave": False, "attention_bias": True}),
    ("deepseek_v3", "dense", {"first_k_dense_replace": 2}),
    ("deepseek_v32", "default", {}),
    ("deepseek_v32", "yarn", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("deepseek_v32", "not-halves", {"rope_interleave": False, "attention_bias": True, "tie_word_embeddings": True}),
    ("glm4_moe_lite", "default", {}),
    ("glm4_moe_lite", "layer-types", {"mlp_layer_types": ["sparse", "dense"], "v_head_dim": 20}),
    ("glm4_moe_lite", "eps", {"rms_norm_eps": 0.1, "n_group": 2}),
    ("glm_moe_dsa", "default", {}),
    ("glm_moe_dsa", "shared", {"indexer_types": ["full", "shared"], "mlp_layer_types": ["sparse", "dense"]}),
    ("kimi_k25", "default", {}),
    ("minicpm3", "default", {}),
    ("minicpm3", "scales", {"scale_emb": 3, "scale_depth": 0.5, "dim_model_base": 8, "q_lora_rank": None}),
    ("minicpm3", "no-scales", {"scale_depth": None, "dim_model_base": None, "v_head_dim": 12}),
    ("minicpm3", "longrope", {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2],
            "long_factor": [2.0, 3.0, 4.0], "original_max_position_embeddings": 16,
        },
    }),
    ("mistral4", "default", {}),
    ("mistral4", "groups", {
        "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "q_lora_rank": None,
    }),
    ("mistral4", "halves", {"rope_interleave": False, "attention_bias": True, "first_k_dense_replace": 0}),
    ("sarvam_mla", "default", {}),
    ("sarvam_mla", "yarn-groups", {"rope_parameters": YARN, "q_lora_rank": 24, "n_group": 2, "topk_group": 1}),
]  # fmt: skip
