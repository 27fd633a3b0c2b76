"""Dense families that are close to Llama, Gemma, Mistral or Granite, in the form of `variants.py`."""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
LATENT = {"kv_lora_rank": 20, "q_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}
TEMPERATURE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7,
}  # fmt: skip
"""Queries grow at positions 16 and 32."""

DENSE_BASE: dict[str, dict[str, Any]] = {
    "arcee": {"num_key_value_heads": 2, "head_dim": 12},
    "cwm": {"num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 5, "sliding_window": 7},
    "exaone": {"num_key_value_heads": 2},
    "exaone4": {"num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 7},
    "gemma": {"num_key_value_heads": 2, "head_dim": 12},
    "granite_swa": {
        "num_key_value_heads": 2, "num_hidden_layers": 5, "sliding_window": 7, "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0,
    },
    "helium": {"num_key_value_heads": 2, "head_dim": 8},
    "hyperclovax": {
        "num_key_value_heads": 2, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
        "logits_scaling": 0.5,
    },
    "internlm3": {"num_key_value_heads": 2, "head_dim": 12},
    "iquestcoder": {"num_key_value_heads": 2, "head_dim": 12},
    "jais2": {"num_key_value_heads": 2},
    "llava": {"num_key_value_heads": 2},
    "ministral": {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 7},
    "ministral3": {"num_key_value_heads": 2, "head_dim": 12, "rope_parameters": TEMPERATURE},
    "mistral3": {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": None},
    "modernbert-decoder": {"num_hidden_layers": 4, "local_attention": 15, "pad_token_id": 0},
    "nanochat": {"num_key_value_heads": 2},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 12},
    "persimmon": {},
    "seed_oss": {"num_key_value_heads": 2, "head_dim": 12},
    "vaultgemma": {
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 3, "sliding_window": 7,
        "query_pre_attn_scalar": 10,
    },
    "youtu": {**LATENT, "num_key_value_heads": 4},
}  # fmt: skip


def rope(kind: str = "default", theta: float = 500.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
DENSES: list[tuple[str, str, dict[str, Any]]] = [
    ("arcee", "default", {}),
    ("arcee", "yarn-bias", {**rope("yarn", **YARN), "attention_bias": True, "mlp_bias": True, "hidden_act": "silu"}),
    ("cwm", "default", {}),
    ("cwm", "types-linear", {
        **rope("linear", factor=3.0), "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "mlp_bias": True,
    }),
    ("exaone", "default", {}),
    ("exaone", "llama3-tied", {**rope("llama3", **LLAMA3), "tie_word_embeddings": True, "head_dim": 12}),
    ("exaone4", "default", {}),
    ("exaone4", "no-window", {**rope("llama3", **LLAMA3), "sliding_window": None, "layer_types": [FULL] * 4}),
    ("exaone4", "types-tied", {"layer_types": [FULL, SLIDING, FULL, FULL], "tie_word_embeddings": True}),
    ("gemma", "default", {}),
    ("gemma", "old-act", {**rope(), "hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": False}),
    ("granite_swa", "default", {}),
    ("granite_swa", "bases", {"layer_rope_theta": [0, 1e4, 500.0, 0.0, 500.0], "tie_word_embeddings": False}),
    ("granite_swa", "types", {"layer_types": [SLIDING, FULL, FULL, SLIDING, FULL], "attention_bias": True}),
    ("helium", "default", {}),
    ("helium", "bias-theta", {**rope(), "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("hyperclovax", "default", {}),
    ("hyperclovax", "no-post-norm", {"use_post_norm": False, "attention_multiplier": None, "head_dim": 12}),
    ("internlm3", "default", {}),
    ("internlm3", "bias-dynamic", {**rope("dynamic", factor=2.0), "qkv_bias": True, "bias": True}),
    ("iquestcoder", "default", {}),
    ("iquestcoder", "bias-tied", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("jais2", "default", {}),
    ("jais2", "no-bias", {**rope(), "attention_bias": False, "mlp_bias": False, "layer_norm_eps": 0.1}),
    ("llava", "default", {}),
    ("llava", "mistral", {"model_type": "mistral", "sliding_window": 9}),
    ("llava", "qwen2-tied", {"model_type": "qwen2", "tie_word_embeddings": True}),
    ("ministral", "default", {}),
    ("ministral", "types", {"layer_types": [SLIDING, FULL]}),
    ("ministral", "theta-tied", {**rope(), "layer_types": [FULL, SLIDING], "tie_word_embeddings": True}),
    ("ministral3", "default", {}),
    ("ministral3", "window-tied", {"sliding_window": 9, "tie_word_embeddings": True}),
    (
        "ministral3",
        "linear",
        rope("linear", factor=2.0, original_max_position_embeddings=10, llama_4_scaling_beta=-0.2),
    ),
    ("mistral3", "default", {}),
    ("mistral3", "ministral3", {"model_type": "ministral3", "rope_parameters": TEMPERATURE}),
    ("modernbert-decoder", "default", {}),
    ("modernbert-decoder", "types", {"layer_types": [SLIDING, FULL, SLIDING, SLIDING], "tie_word_embeddings": False}),
    ("modernbert-decoder", "biases", {
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True), "decoder_bias": False,
        "classifier_activation": "silu",
    }),
    ("nanochat", "default", {}),
    ("nanochat", "bias-theta", {**rope(), "attention_bias": True, "final_logit_softcapping": 2.0}),
    ("nemotron", "default", {}),
    ("nemotron", "bias-linear", {**rope("linear", factor=3.0), "attention_bias": True, "mlp_bias": True}),
    ("nemotron", "partial-tied", {**rope(partial_rotary_factor=0.75), "tie_word_embeddings": True, "norm_eps": 0.1}),
    ("persimmon", "default", {}),
    ("persimmon", "no-norms-tied", {"qk_layernorm": False, "hidden_act": "gelu", "tie_word_embeddings": True}),
    ("persimmon", "whole-heads", {**rope("linear", factor=3.0, partial_rotary_factor=1.0), "layer_norm_eps": 0.1}),
    ("seed_oss", "default", {}),
    ("seed_oss", "biases", {**rope(), "attention_out_bias": True, "mlp_bias": True}),
    ("seed_oss", "no-bias", {"attention_bias": False, "tie_word_embeddings": True, "head_dim": None}),
    ("vaultgemma", "default", {}),
    ("vaultgemma", "no-caps", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("youtu", "default", {}),
    ("youtu", "halves-bias", {"rope_interleave": False, "attention_bias": True, "tie_word_embeddings": False}),
    ("youtu", "yarn-whole-queries", {**rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.7), "q_lora_rank": None}),
]  # fmt: skip
