"""Families with ALiBi, clipped queries or xIELU, and others of their time, in the form of `variants.py`."""

from __future__ import annotations

from typing import Any

OLDER_BASE: dict[str, dict[str, Any]] = {
    "apertus": {"num_key_value_heads": 2}, "apertus1p5_text": {"num_key_value_heads": 2}, "bloom": {},
    "codegen": {"rotary_dim": 4}, "falcon": {"ffn_hidden_size": 56}, "gpt_bigcode": {"n_inner": 56},
    "mpt": {"max_seq_len": 80}, "olmo": {"num_key_value_heads": 2},
}  # fmt: skip
WITHOUT_POSITIONS = ("bloom", "mpt")
"""Families without `max_position_embeddings`."""
WITHOUT_WIDTH = ("bloom", "codegen", "dbrx", "falcon", "gpt_bigcode", "kolibri1", "lara_mini", "mpt")
"""Families without `intermediate_size`."""

TWELVE = {"num_attention_heads": 12, "hidden_size": 48}
"""Twelve heads have slopes of ALiBi that are no powers of two, in two series."""
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip

OLDER: list[tuple[str, str, dict[str, Any]]] = [
    ("apertus", "default", {}),
    ("apertus", "silu-bias", {"hidden_act": "silu", "attention_bias": True, "tie_word_embeddings": True}),
    ("apertus", "yarn", {"rope_parameters": YARN, "head_dim": 12}),
    ("apertus1p5_text", "default", {}),
    ("apertus1p5_text", "pruned", {"output_vocab_size": 60}),
    ("bloom", "default", {}),
    ("bloom", "twelve-untied", {**TWELVE, "tie_word_embeddings": False}),
    ("bloom", "norms", {"apply_residual_connection_post_layernorm": True, "layer_norm_epsilon": 0.1}),
    ("codegen", "default", {}),
    ("codegen", "n_inner-tied", {"n_inner": 24, "activation_function": "gelu", "tie_word_embeddings": True}),
    ("falcon", "default", {}),
    ("falcon", "40b", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", "11b", {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1}),
    ("falcon", "new-mha-untied", {"new_decoder_architecture": True, "tie_word_embeddings": False, **LINEAR}),
    ("falcon", "rw", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, **TWELVE}),
    ("falcon", "rw-mqa", {"alibi": True, "activation": "relu"}),
    ("gpt_bigcode", "default", {}),
    ("gpt_bigcode", "mha-untied", {"multi_query": False, "n_inner": None, "tie_word_embeddings": False}),
    ("gpt_bigcode", "scale", {"scale_attn_weights": False, "activation_function": "gelu"}),
    ("mpt", "default", {}),
    ("mpt", "clip", {"attn_config": {"clip_qkv": 0.6, "softmax_scale": 0.3}, "tie_word_embeddings": False}),
    ("mpt", "twelve", {**TWELVE, "layer_norm_epsilon": 0.1}),
    ("olmo", "default", {}),
    ("olmo", "clip-bias", {"clip_qkv": 0.5, "attention_bias": True, "num_key_value_heads": None}),
    ("olmo", "tied-linear", {"tie_word_embeddings": True, **LINEAR}),
]  # fmt: skip
