"""Variants of Gemma 4, in the form of `variants.py`: small models with the structure of each size."""

from __future__ import annotations

from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"

GEMMA4_BASE: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "global_head_dim": 20,
        "sliding_window": 7,
        "num_hidden_layers": 7,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 99,
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_unified_text": {
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 12,
        "global_head_dim": 20,
        "sliding_window": 9,
        "num_hidden_layers": 3,
        "layer_types": [SLIDING, FULL, FULL],
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
    },
}
GEMMA4_BASE["gemma4"] = GEMMA4_BASE["gemma4_text"]

LARGE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
"""What 26B-A4B and 31B lack."""
KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}


def ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {FULL: {"rope_theta": 1e6, **full}, SLIDING: {"rope_theta": 1e4, **sliding}}}


GEMMA4: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma4_text", "default", {}),
    ("gemma4_text", "26b", LARGE | KEYS | EXPERTS | {"sliding_window": 16}),
    ("gemma4_text", "31b", LARGE | KEYS | {"attention_bias": True, "tie_word_embeddings": False}),
    ("gemma4_text", "all", KEYS | EXPERTS | {"num_kv_shared_layers": 4, "attention_bias": True}),
    ("gemma4_text", "layers", LARGE | {"layer_types": None, "final_logit_softcapping": None, "head_dim": 20}),
    (
        "gemma4_text",
        "rope",
        ropes(
            {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
            {"rope_type": "linear", "factor": 3.0},
        ),
    ),
    ("gemma4_text", "plain-rope", ropes({"rope_type": "default"}, {"rope_type": "default", "rope_theta": 50.0})),
    (
        "gemma4_text",
        "per_layer_config",
        {
            "per_layer_config": {layer: {"head_dim": 16, "num_key_value_heads": 1} for layer in (1, 4, 6)},
            "use_double_wide_mlp": False,
        },
    ),
    ("gemma4_unified_text", "default", {}),
    ("gemma4_unified_text", "four-layers", {"num_hidden_layers": 4, "layer_types": None, "num_kv_shared_layers": 0}),
    ("gemma4", "default", {}),
]
