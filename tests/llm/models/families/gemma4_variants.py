"""Variants of Gemma 4, in the form of `variants.py`: small models with the structure of each size. And the published
configs, with shortened towers."""

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


def published(model_type: str, every: int, **text: Any) -> dict[str, Any]:
    """The config of a size. The last of each `every` layers sees all positions."""
    class_name = "Gemma4Unified" if "unified" in model_type else "Gemma4"
    layers = [FULL if layer % every == every - 1 else SLIDING for layer in range(text["num_hidden_layers"])]
    usual = {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "bos_token_id": 2,
        "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "layer_types": layers,
        "max_position_embeddings": 262144, "model_type": f"{model_type}_text", "moe_intermediate_size": None,
        "num_experts": None, "num_global_key_value_heads": None, "num_kv_shared_layers": 0, "pad_token_id": 0,
        "rms_norm_eps": 1e-06, "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": None,
        "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }  # fmt: skip
    return {
        "architectures": [f"{class_name}ForConditionalGeneration"], "audio_config": None, "audio_token_id": 258881,
        "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_id": 258883,
        "eoa_token_index": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880,
        "initializer_range": 0.02, "model_type": model_type, "text_config": usual | text, "tie_word_embeddings": True,
        "transformers_version": "5.5.0.dev0", "video_token_id": 258884, "vision_soft_tokens_per_image": 280,
        "vision_config": {"hidden_size": 768, "model_type": f"{model_type}_vision"},
    }  # fmt: skip


SMALL = {
    "hidden_size_per_layer_input": 256, "max_position_embeddings": 131072, "num_attention_heads": 8,
    "sliding_window": 512, "use_bidirectional_attention": None,
}  # fmt: skip
PUBLISHED_GEMMA4 = {
    "gemma-4-E2B-it": published(
        "gemma4", 5, **SMALL, hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_key_value_heads=1,
        num_kv_shared_layers=20, use_double_wide_mlp=True,
    ),
    "gemma-4-E4B-it": published(
        "gemma4", 6, **SMALL, hidden_size=2560, intermediate_size=10240, num_hidden_layers=42, num_key_value_heads=2,
        num_kv_shared_layers=18,
    ),
    "gemma-4-12B-it": published(
        "gemma4_unified", 6, hidden_size=3840, intermediate_size=15360, num_attention_heads=16, num_hidden_layers=48,
        num_key_value_heads=8, num_global_key_value_heads=1, attention_k_eq_v=True,
    ),
    "gemma-4-26B-A4B-it": published(
        "gemma4", 6, hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_hidden_layers=30,
        num_key_value_heads=8, num_global_key_value_heads=2, attention_k_eq_v=True, enable_moe_block=True,
        moe_intermediate_size=704, num_experts=128, top_k_experts=8,
    ),
    "gemma-4-31B-it": published(
        "gemma4", 6, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_hidden_layers=60,
        num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True,
    ),
}  # fmt: skip
