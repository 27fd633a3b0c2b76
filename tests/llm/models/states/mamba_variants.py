"""Families with Mamba-2 layers, in the form of `variants.py`."""

from __future__ import annotations

from typing import Any

SIZES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
FACTORS = {
    "key_multiplier": 0.4, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.5, 1.5, 0.7, 1.4, 0.8], "mlp_multipliers": [0.6, 1.7],
    "embedding_multiplier": 2.5, "lm_head_multiplier": 0.5,
}  # fmt: skip

MAMBA_BASE: dict[str, dict[str, Any]] = {
    "bamba": {**SIZES, "num_key_value_heads": 2, "attn_layer_indices": [1], "pad_token_id": 0},
    "falcon_h1": {**SIZES, "num_key_value_heads": 2, "mamba_n_heads": 6, "mamba_d_ssm": 48, **FACTORS},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "granitemoehybrid": {
        **SIZES, "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 3, "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0,
    },
    "nemotron_h": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 1.5,
        "time_step_min": 1e-30,  # transformers clamps steps to it, the publisher's code does not
    },
}  # fmt: skip
MAMBA_ROUTED = {"granitemoehybrid", "nemotron_h"}

MAMBAS: list[tuple[str, str, dict[str, Any]]] = [
    ("bamba", "default", {}),
    ("bamba", "biases-limits", {
        "attn_layer_indices": [0], "mamba_proj_bias": True, "mamba_conv_bias": False, "time_step_limit": [0.3, 0.6],
    }),
    ("bamba", "auto-tied", {"mamba_d_head": "auto", "mamba_n_groups": 1, "tie_word_embeddings": True}),
    ("falcon_h1", "default", {}),
    ("falcon_h1", "norm", {"mamba_rms_norm": True, "tie_word_embeddings": True}),
    ("falcon_h1", "gate-first", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1}),
    ("mamba2", "default", {}),
    ("mamba2", "biases-tied", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}),
    ("granitemoehybrid", "default", {}),
    ("granitemoehybrid", "dense-rope", {
        "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope", "mamba_proj_bias": True,
    }),
    ("granitemoehybrid", "all-mamba", {"layer_types": None, "mamba_d_conv": 2}),
    ("granitemoehybrid", "all-attention", {"layer_types": ["full_attention"] * 2, "num_local_experts": 0}),
    ("nemotron_h", "default", {}),
    ("nemotron_h", "latent-groups", {
        "layers_block_type": ["moe", "linear_attention", "moe"], "moe_latent_size": 24, "mlp_bias": True, "n_group": 4,
        "topk_group": 2,
    }),
    ("nemotron_h", "dense", {
        "layers_block_type": ["mlp", "full_attention", "linear_attention"], "use_bias": True, "mlp_hidden_act": "silu",
    }),
]  # fmt: skip
