"""The config.json of published mixtures, in the form of `published_configs.py`. Shorter lists stand for long ones."""

from __future__ import annotations

from typing import Any

from tests.llm.models.published.published_configs import PUBLISHED
from tests.llm.models.published.published_latent import FP8_BLOCKS

FULL, SLIDING = "full_attention", "sliding_attention"

TRINITY_NANO = {
    "architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "dtype": "bfloat16", "model_type": "afmoe",
    "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 14,
    "load_balance_coeff": 0.001, "max_position_embeddings": 131072, "moe_intermediate_size": 256, "mup_enabled": True,
    "n_group": 1, "num_attention_heads": 8, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 56, "num_key_value_heads": 2, "num_limited_groups": 1,
    "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "route_norm": True,
    "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048, "tie_word_embeddings": False,
    "topk_group": 1, "transformers_version": "4.57.3", "use_cache": True, "use_grouped_mm": True, "vocab_size": 200192,
}  # fmt: skip
LING_MINI = {
    "architectures": ["BailingMoeV2ForCausalLM"], "attention_dropout": 0.0, "auto_map": {}, "num_hidden_layers": 20,
    "hidden_size": 2048, "intermediate_size": 5120, "eos_token_id": 156892, "pad_token_id": 156892,
    "first_k_dense_replace": 1, "hidden_act": "silu", "max_position_embeddings": 32768, "model_type": "bailing_moe",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_attention_heads": 16,
    "num_experts": 256, "num_key_value_heads": 4, "rope_theta": 600000, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_bias": False, "use_rmsnorm": True,
    "rms_norm_eps": 1e-06, "head_dim": 128, "num_shared_experts": 1, "use_cache": True, "use_qkv_bias": False,
    "embedding_dropout": 0.0, "output_dropout": 0.0, "vocab_size": 157184, "partial_rotary_factor": 0.5,
    "router_dtype": "fp32", "moe_router_enable_expert_bias": True, "routed_scaling_factor": 2.5, "n_group": 8,
    "topk_group": 4, "use_qk_norm": True, "score_function": "sigmoid", "moe_shared_expert_intermediate_size": 512,
}  # fmt: skip
KIMI_TEXT = {name: value for name, value in PUBLISHED["Kimi-K2-Instruct"].items() if name != "quantization_config"}
INT4_EXPERTS = PUBLISHED["Kimi-K2-Thinking"]["quantization_config"]

MIXTURES: dict[str, dict[str, Any]] = {
    "Trinity-Nano-Preview": TRINITY_NANO,
    "Trinity-Mini": TRINITY_NANO | {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 4, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
    },
    "Ling-mini-2.0": LING_MINI,
    "dots.llm1.inst": {
        "architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 151645, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944,
        "max_position_embeddings": 32768, "max_window_layers": 62, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000,
        "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": None,
        "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 152064,
    },
    "K-EXAONE-236B-A23B": {
        "architectures": ["ExaoneMoEForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16",
        "eos_token_id": 53, "first_last_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 6144, "initializer_range": 0.02, "intermediate_size": 18432,
        "is_moe_layer": [False] + [True] * 47, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 12,
        "max_position_embeddings": 262144, "model_type": "exaone_moe", "moe_intermediate_size": 2048, "n_group": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1,
        "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True,
        "vocab_size": 153600,
    },
    "Kimi-K2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"], "bos_token_id": 163584, "dtype": "bfloat16",
        "eos_token_id": 163585, "ignore_index": -100, "media_placeholder_token_id": 163605, "model_type": "kimi_k25",
        "pad_token_id": 163839, "quantization_config": INT4_EXPERTS, "text_config": KIMI_TEXT,
        "tie_word_embeddings": False, "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>", "vision_config": {"vt_num_hidden_layers": 27},
    },
    "Laguna-XS-2.1": {
        "model_type": "laguna", "architectures": ["LagunaForCausalLM"], "vocab_size": 100352, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 48,
        "num_attention_heads_per_layer": [48, 64, 64, 64] * 10, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 10, "sliding_window": 512,
        "rope_parameters": {
            FULL: {
                "rope_theta": 500000.0, "rope_type": "yarn", "factor": 32.0, "beta_slow": 1.0, "beta_fast": 64.0,
                "original_max_position_embeddings": 8192, "attention_factor": 1.3465735902799727,
                "partial_rotary_factor": 0.5,
            },
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "mlp_only_layers": [0], "moe_routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "tie_word_embeddings": False, "gating": "per-head", "attention_bias": False,
        "mlp_layer_types": ["dense"] + ["sparse"] * 39, "eos_token_id": [2, 24], "torch_dtype": "bfloat16",
    },
    "MiniMax-M2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 62,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
        "max_position_embeddings": 196608, "mlp_intermediate_size": 8192, "model_type": "minimax_m2",
        "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
        "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "quantization_config": FP8_BLOCKS | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
        "tie_word_embeddings": False, "use_cache": True, "use_mtp": True, "use_qk_norm": True,
        "use_routing_bias": True, "vocab_size": 200064,
    },
    "Solar-Open-100B": {
        "architectures": ["SolarOpenForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 0, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 10240, "max_position_embeddings": 131072,
        "model_type": "solar_open", "moe_intermediate_size": 1280, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"},
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
        "use_cache": True, "use_qk_norm": False, "vocab_size": 196608,
    },
}  # fmt: skip
