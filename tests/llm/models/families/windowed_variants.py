"""Mixtures of experts whose layers have windows of their own, in the form of `variants.py`."""

from __future__ import annotations

from typing import Any

from tests.llm.models.families.mixture_variants import FULL, SLIDING, SMALL_EXPERTS

WINDOWED_BASE: dict[str, dict[str, Any]] = {
    "afmoe": {
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 7, "num_experts": 8,
        "route_scale": 1.7, **SMALL_EXPERTS,
    },
    "flint": {
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 5, "sliding_window": 7, "num_experts": 8,
        "shared_expert_intermediate_size": 20, **SMALL_EXPERTS,
    },
    "kolibri1": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "num_experts": 8,
        "shared_expert_intermediate_size": 20,
        **SMALL_EXPERTS,
        "num_experts_per_tok": 6,  # of 8, so that rounding seldom changes which experts are chosen
    },
    "laguna": {
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 6, 2], "sliding_window": 7, "num_experts": 8,
        "shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 1.7, **SMALL_EXPERTS,
    },
    "mellum": {
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 7,
        "num_experts": 8, **SMALL_EXPERTS,
    },
}  # fmt: skip

WINDOWED: list[tuple[str, str, dict[str, Any]]] = [
    ("flint", "default", {}),
    ("flint", "types", {
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "mlp_only_layers": [3], "norm_topk_prob": False,
        "attention_bias": True,
    }),
    ("kolibri1", "default", {}),
    ("kolibri1", "normalised", {
        "norm_topk_prob": True, "layer_types": [FULL, SLIDING, FULL, SLIDING, SLIDING], "tie_word_embeddings": True,
    }),
    ("afmoe", "default", {}),
    ("afmoe", "mup-bias", {"mup_enabled": True, "attention_bias": True, "num_shared_experts": 1}),
    ("afmoe", "types", {"layer_types": [FULL, SLIDING, FULL, SLIDING], "num_dense_layers": 0, "head_dim": 20}),
    ("afmoe", "tied-all", {"global_attn_every_n_layers": 2, "num_dense_layers": 4, "tie_word_embeddings": True}),
    ("laguna", "default", {}),
    ("laguna", "per-element", {"gating": "per-element", "attention_bias": True, "moe_router_logit_softcapping": 0.4}),
    ("laguna", "uniform", {
        "num_attention_heads_per_layer": None, "layer_types": None, "tie_word_embeddings": True,
        "mlp_layer_types": ["sparse"] * 3, "gating": "per-head",
    }),
    ("laguna", "ropes", {
        "rope_parameters": {
            FULL: {
                "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16,
                "partial_rotary_factor": 0.5,
            },
            SLIDING: {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
        },
    }),
    ("mellum", "default", {}),
    ("mellum", "dense", {
        "mlp_layer_types": ["dense", "sparse", "sparse"], "attention_bias": True, "norm_topk_prob": False,
    }),
    ("mellum", "full", {"layer_types": None, "tie_word_embeddings": True}),
]  # fmt: skip
