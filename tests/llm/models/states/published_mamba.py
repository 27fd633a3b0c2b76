"""Published config.json of checkpoints with Mamba-2 layers, by name, including fields that `transformers` does not
read."""

from __future__ import annotations

import math
from typing import Any

COMMON = {"initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.56.0", "use_cache": True}


def granite(layers: str, **fields: Any) -> dict[str, Any]:
    """Returns the common fields of Granite 4, and `fields`. `layers`: m for Mamba-2, a for attention."""
    return COMMON | {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": False,
        "attention_dropout": 0.0, "attention_multiplier": 0.015625, "bos_token_id": 100257, "eos_token_id": 100257,
        "pad_token_id": 100256, "embedding_multiplier": 12, "hidden_act": "silu", "init_method": "mup",
        "layer_types": ["mamba" if letter == "m" else "attention" for letter in layers],
        "num_hidden_layers": len(layers),
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 128, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_proj_bias": False, "normalization_function": "rmsnorm",
        "output_router_logits": False, "position_embedding_type": "nope", "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000, "router_aux_loss_coef": 0.01, "tie_word_embeddings": True, "vocab_size": 100352,
    } | fields  # fmt: skip


def nemotron(pattern: str, **fields: Any) -> dict[str, Any]:
    """Returns the common fields of Nemotron-H and Nemotron 3, and `fields`."""
    return COMMON | {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 11, "pad_token_id": 0, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
        "hidden_dropout": 0.0, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern),
        "layer_norm_epsilon": 1e-05, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "mlp_bias": False,
        "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 32, "num_logits_to_keep": 1,
        "rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None, "ssm_state_size": 128,
        "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_limit": [0.0, math.inf],
        "time_step_max": 0.1, "time_step_min": 0.001, "use_bias": False, "use_conv_bias": True,
        "use_mamba_kernels": True, "vocab_size": 131072,
    } | fields  # fmt: skip


MAMBAS: dict[str, dict[str, Any]] = {
    "granite-4.0-h-350m": granite(
        "mmmmmmmmmmammammmammmmmmmmmammmm", hidden_size=768, intermediate_size=2048, logits_scaling=3,
        mamba_d_head=32, mamba_n_heads=48, max_position_embeddings=32768, num_attention_heads=12,
        num_experts_per_tok=0, num_key_value_heads=4, num_local_experts=0, residual_multiplier=0.246,
        shared_intermediate_size=2048,
    ),
    "granite-4.0-h-tiny": granite(
        "mmmmmammmmmmmmmammmmmmmmmammmmmmmmmammmm", hidden_size=1536, intermediate_size=512, logits_scaling=6,
        attention_multiplier=0.0078125, mamba_d_head=64, mamba_n_heads=48, max_position_embeddings=131072,
        num_attention_heads=12, num_experts_per_tok=6, num_key_value_heads=4, num_local_experts=64,
        residual_multiplier=0.22, shared_intermediate_size=1024,
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": nemotron(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", head_dim=128, hidden_size=2688,
        intermediate_size=1856, mamba_head_dim=64, mamba_num_heads=64, mamba_ssm_cache_dtype="float32",
        max_position_embeddings=262144, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
        n_group=1, n_routed_experts=128, n_shared_experts=1, norm_eps=1e-05, norm_topk_prob=True,
        num_experts_per_tok=6, num_key_value_heads=2, partial_rotary_factor=1.0, rope_theta=10000,
        routed_scaling_factor=2.5, topk_group=1,
    ),
    "Nemotron-H-8B-Base-8K": nemotron(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", attention_head_dim=128, hidden_size=4096,
        intermediate_size=21504, mamba_head_dim=64, mamba_num_heads=128, max_position_embeddings=8192,
        num_key_value_heads=8, rms_norm_eps=1e-05, eos_token_id=2,
    ),
    "Bamba-9B-v2": COMMON | {
        "architectures": ["BambaForCausalLM"], "model_type": "bamba", "attention_bias": False,
        "attention_dropout": 0.0, "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "bos_token_id": 128000,
        "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
        "max_position_embeddings": 4096, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 128256,
    },
    "Mamba-Codestral-7B-v0.1": COMMON | {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "bos_token_id": 0, "eos_token_id": 0,
        "pad_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "n_groups": 8,
        "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64, "rescale_prenorm_residual": False,
        "residual_in_fp32": True, "rms_norm": True, "state_size": 128, "tie_word_embeddings": False,
        "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_limit": [0.0, math.inf],
        "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0,
        "use_bias": False, "use_conv_bias": True, "vocab_size": 32768,
    },
    "Falcon-H1-0.5B-Instruct": COMMON | {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "attention_bias": False,
        "attention_dropout": 0.0, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
        "attn_layer_indices": None, "bos_token_id": 1, "eos_token_id": 11, "embedding_multiplier": 5.656854249492381,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2048,
        "key_multiplier": 0.39062499999999994, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False,
        "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "max_position_embeddings": 16384,
        "mlp_bias": False, "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "num_attention_heads": 8, "num_hidden_layers": 36, "num_key_value_heads": 2, "num_logits_to_keep": 1,
        "pad_token_id": 0, "projectors_bias": False, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, "vocab_size": 32784,
    },
}  # fmt: skip
