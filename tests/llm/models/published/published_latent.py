"""The config.json of published checkpoints with latent attention, in the form of `published_configs.py`."""

from __future__ import annotations

from typing import Any

LINEAR = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}
"""Fields of nearly all configs."""

FP8_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def deepseek(model_type: str, **fields: Any) -> dict[str, Any]:
    """Returns the common fields of DeepSeek checkpoints, named as in their own code, and `fields`."""
    stem = "DeepseekV2" if model_type == "deepseek_v2" else "DeepseekV3"
    common = {
        "architectures": [f"{stem}ForCausalLM"], "model_type": model_type, "attention_bias": False,
        "auto_map": {"AutoConfig": f"configuration_deepseek.{stem}Config"}, "aux_loss_alpha": 0.001, "ep_size": 1,
        "hidden_act": "silu", "kv_lora_rank": 512, "moe_layer_freq": 1, "pretraining_tp": 1, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-06, "seq_aux": True,
        "tie_word_embeddings": False, "transformers_version": "4.33.1",
    }  # fmt: skip
    return LINEAR | common | fields


DEEPSEEK_V3 = deepseek(
    "deepseek_v3", bos_token_id=0, eos_token_id=1, first_k_dense_replace=3, hidden_size=7168, intermediate_size=18432,
    max_position_embeddings=163840, moe_intermediate_size=2048, n_group=8, n_routed_experts=256, n_shared_experts=1,
    norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128,
    num_nextn_predict_layers=1, q_lora_rank=1536, quantization_config=FP8_BLOCKS, rope_theta=10000,
    rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                  "original_max_position_embeddings": 4096, "type": "yarn"},
    routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc", vocab_size=129280,
)  # fmt: skip

LATENT: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-R1": DEEPSEEK_V3,
    "DeepSeek-V3.1": DEEPSEEK_V3 | {"quantization_config": FP8_BLOCKS | {"scale_fmt": "ue8m0"}},
    "Kimi-K2-Instruct": DEEPSEEK_V3 | {
        "model_type": "kimi_k2", "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
        "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1, "n_routed_experts": 384,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
        "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "max_length": 20,
        "chunk_size_feed_forward": 0, "quantization_config": {**FP8_BLOCKS},
    },
    "Moonlight-16B-A3B": DEEPSEEK_V3 | {
        "bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 163838, "first_k_dense_replace": 1,
        "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_nextn_predict_layers": 0, "q_lora_rank": None, "quantization_config": None, "rope_scaling": None,
        "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1,
        "vocab_size": 163840,
    },
    "DeepSeek-V2": deepseek(
        "deepseek_v2", bos_token_id=100000, eos_token_id=100001, first_k_dense_replace=1, hidden_size=5120,
        intermediate_size=12288, max_position_embeddings=163840, moe_intermediate_size=1536, n_group=8,
        n_routed_experts=160, n_shared_experts=2, norm_topk_prob=False, num_attention_heads=128, num_experts_per_tok=6,
        num_hidden_layers=60, num_key_value_heads=128, q_lora_rank=1536, rope_theta=10000,
        rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                      "original_max_position_embeddings": 4096, "type": "yarn"},
        routed_scaling_factor=16.0, scoring_func="softmax", topk_group=3, topk_method="group_limited_greedy",
        vocab_size=102400,
    ),
    "DeepSeek-V2-Lite": deepseek(
        "deepseek_v2", bos_token_id=100000, eos_token_id=100001, first_k_dense_replace=1, hidden_size=2048,
        intermediate_size=10944, max_position_embeddings=163840, moe_intermediate_size=1408, n_group=1,
        n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False, num_attention_heads=16, num_experts_per_tok=6,
        num_hidden_layers=27, num_key_value_heads=16, q_lora_rank=None, rope_theta=10000,
        rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                      "original_max_position_embeddings": 4096, "type": "yarn"},
        routed_scaling_factor=1.0, scoring_func="softmax", topk_group=1, topk_method="greedy", vocab_size=102400,
    ),
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "pad_token_id": 154820, "eos_token_id": [154820, 154827, 154829], "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10240, "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
        "moe_intermediate_size": 1536, "topk_method": "noaux_tc", "norm_topk_prob": True, "num_attention_heads": 20,
        "n_group": 1, "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
        "num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_hidden_layers": 47, "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "tie_word_embeddings": False, "dtype": "bfloat16", "transformers_version": "5.0.0rc0",
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "MiniCPM3-4B": {
        "_name_or_path": "openbmb/MiniCPM3-4B", "architectures": ["MiniCPM3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPM3Config"}, "bos_token_id": 1, "eos_token_id": [2,
        73440],
        "hidden_act": "silu", "initializer_range": 0.1, "hidden_size": 2560, "num_hidden_layers": 62,
        "intermediate_size": 6400, "max_position_embeddings": 32768, "model_type": "minicpm3",
        "num_attention_heads": 40, "num_key_value_heads": 40, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "q_lora_rank": 768, "kv_lora_rank": 256, "rms_norm_eps": 1e-05, "pad_token_id": 2, "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "longrope", "long_factor": [1.1] * 16, "short_factor": [1.0] * 16,
                         "original_max_position_embeddings": 32768},
        "transformers_version": "4.41.0", "use_cache": True, "vocab_size": 73448, "scale_emb": 12,
        "dim_model_base": 256, "scale_depth": 1.4,
    },
}  # fmt: skip

KIMI_INT4 = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int", "actorder": None,
             "block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {}}  # fmt: skip
LATENT["Kimi-K2-Thinking"] = LATENT["Kimi-K2-Instruct"] | {
    "max_position_embeddings": 262144,
    "rope_scaling": LATENT["Kimi-K2-Instruct"]["rope_scaling"] | {"factor": 64.0},
    "quantization_config": {
        "config_groups": {
            "group_0": {
                "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": KIMI_INT4,
            },
        },
        "format": "pack-quantized", "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        "quantization_status": "compressed",
    },
}  # fmt: skip
