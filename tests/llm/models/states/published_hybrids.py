"""Published config.json of LFM2, Qwen3-Next, Qwen3.5 and OLMo-Hybrid, including fields that `transformers` does not
read. Vision parts are shortened."""

from __future__ import annotations

from typing import Any

COMMON = {"initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.57.0", "use_cache": True}
LINEAR = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}  # fmt: skip
THREE_OF_FOUR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


def qwen3_5(model_type: str, layers: int, **fields: Any) -> dict[str, Any]:
    """Returns a config with the common fields of Qwen3.5, and `fields` in its text part."""
    stem = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[model_type]
    text = COMMON | LINEAR | {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "layer_types": THREE_OF_FOUR * (layers // 4), "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": f"{model_type}_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_hidden_layers": layers, "rms_norm_eps": 1e-06,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"},
        "vocab_size": 248320,
    } | fields  # fmt: skip
    return {
        "architectures": [f"{stem}ForConditionalGeneration"], "model_type": model_type, "image_token_id": 248056,
        "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
        "text_config": text, "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0",
        "vision_config": {"depth": 27, "model_type": model_type, "out_hidden_size": text["hidden_size"]},
    }  # fmt: skip


HYBRIDS: dict[str, dict[str, Any]] = {
    "LFM2-1.2B": COMMON | {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True,
        "block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True,
        "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048,
        "conv_dim_out": 2048, "conv_use_xavier_init": True, "eos_token_id": 7,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
        "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0, "theta": 1000000.0,
        "tie_embedding": True, "use_pos_enc": True, "vocab_size": 65536,
    },
    "LFM2-8B-A1B": COMMON | {
        "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "bos_token_id": 1, "conv_L_cache": 3,
        "conv_bias": False, "eos_token_id": 7, "hidden_size": 2048, "intermediate_size": 7168,
        "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        "max_position_embeddings": 128000, "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0, "use_expert_bias": True, "vocab_size": 65536,
    },
    "Qwen3-Next-80B-A3B-Instruct": COMMON | LINEAR | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 5120, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3.5-27B": qwen3_5("qwen3_5", 64, hidden_size=5120, intermediate_size=17408, num_attention_heads=24,
                           num_key_value_heads=4, linear_num_value_heads=48),
    "Qwen3.8-27B": qwen3_5("qwen3_5", 64, hidden_size=5120, intermediate_size=17408, num_attention_heads=24,
                           num_key_value_heads=4, linear_num_value_heads=48, output_gate_type="swish"),
    "Qwen3.5-35B-A3B": qwen3_5(
        "qwen3_5_moe", 40, hidden_size=2048, moe_intermediate_size=512, num_attention_heads=16, num_key_value_heads=2,
        num_experts=256, num_experts_per_tok=8, router_aux_loss_coef=0.001, shared_expert_intermediate_size=512,
    ),
    "Olmo-Hybrid-7B": COMMON | {
        "architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 100257, "hidden_act": "silu",
        "hidden_size": 3840, "intermediate_size": 11008, "layer_types": THREE_OF_FOUR * 8,
        "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 96,
        "linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_use_gate": True,
        "linear_value_head_dim": 192, "max_position_embeddings": 65536, "num_attention_heads": 30,
        "num_hidden_layers": 32, "num_key_value_heads": 30, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
        "rope_theta": None, "tie_word_embeddings": False, "vocab_size": 100352,
    },
}  # fmt: skip
