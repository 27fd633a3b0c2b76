"""Published config.json of more dense checkpoints. Long lists of numbers are made up, and vision parts are
shortened."""

from __future__ import annotations

from typing import Any

from tests.llm.models.families.gemma4_variants import PUBLISHED_GEMMA4

USUAL = {"initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True, "transformers_version": "4.44.0"}
VISION_TOKENS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_end_token_id": 151653, "vision_start_token_id": 151652,
}  # fmt: skip
QWEN2_5_VL = USUAL | VISION_TOKENS | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_token_id": 151654, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 11008, "max_position_embeddings": 128000, "max_window_layers": 70, "model_type": "qwen2_5_vl",
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "out_hidden_size": 2048},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151936,
}  # fmt: skip
STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "residual_dropout": 0.1,
    "embedding_dropout": 0.1, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 4608, "initializer_range": 0.018042, "intermediate_size": 18432, "max_position_embeddings": 16384,
    "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm",
    "num_attention_heads": 36, "num_hidden_layers": 32, "num_key_value_heads": 4, "rope_theta": 1000000,
    "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.39.0.dev0", "use_bias": True,
    "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
COMMAND_R = USUAL | {
    "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
    "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 22528,
    "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192, "model_max_length": 131072,
    "model_type": "cohere", "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 64,
    "pad_token_id": 0, "pretraining_tp": 1, "rope_theta": 8000000.0, "use_qk_norm": False, "vocab_size": 256000,
}  # fmt: skip
GEMMA_2 = USUAL | {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
    "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16, "num_hidden_layers": 42,
    "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000,
}  # fmt: skip
GLM = USUAL | {
    "architectures": ["GlmForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 13696, "max_position_embeddings": 131072, "model_type": "glm", "num_attention_heads": 32,
    "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07, "rope_theta": 5000000.0, "tie_word_embeddings": False, "vocab_size": 151552,
}  # fmt: skip

DENSE: dict[str, dict[str, Any]] = {
    **PUBLISHED_GEMMA4,
    "Qwen2.5-VL-3B-Instruct": QWEN2_5_VL,
    "Qwen2-VL-2B-Instruct": QWEN2_5_VL | {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_size": 1536,
        "intermediate_size": 8960, "max_position_embeddings": 32768, "max_window_layers": 28,
        "num_attention_heads": 12, "num_hidden_layers": 28,
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 1536},
    },
    "Qwen3-VL-4B-Instruct": VISION_TOKENS | {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "transformers_version": "4.57.0.dev0",
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
            "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
            "initializer_range": 0.02, "intermediate_size": 9728, "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 151936,
        },
        "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024},
    },
    "gemma-2-9b-it": GEMMA_2,
    "gemma-2-27b-it": GEMMA_2 | {
        "head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32,
        "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144,
        "_attn_implementation": "eager",
    },
    "gemma-3-1b-it": USUAL | {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "granite-3.0-8b-instruct": USUAL | {
        "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
        "attention_multiplier": 0.0078125, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12800, "logits_scaling": 16.0,
        "max_position_embeddings": 4096, "mlp_bias": False, "model_type": "granite", "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "glm-4-9b-chat-hf": GLM,
    "GLM-Z1-32B-0414": GLM | {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": False, "hidden_size": 6144,
        "intermediate_size": 23040, "max_position_embeddings": 32768, "num_attention_heads": 48,
        "num_hidden_layers": 61, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    },
    "c4ai-command-r-v01": COMMAND_R,
    "aya-expanse-8b": COMMAND_R | {
        "hidden_size": 4096, "intermediate_size": 14336, "logit_scale": 0.125, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 10000, "model_max_length": 8192,
    },
    "starcoder2-7b": STARCODER2,
    "starcoder2-15b": STARCODER2 | {
        "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48, "num_hidden_layers": 40,
        "rope_theta": 100000, "attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True, "layer_norm_epsilon": 1e-05,
    },
    "stablelm-zephyr-3b": {
        "architectures": ["StableLmForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu",
        "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 6912, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 4096, "model_type": "stablelm", "num_attention_heads": 32, "num_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_theta": 10000,
        "rotary_scaling_factor": 1.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.38.0", "use_cache": True, "use_qkv_bias": False, "vocab_size": 50304,
    },
    "distilgpt2": {
        "_num_labels": 1, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "id2label": {"0": "LABEL_0"},
        "initializer_range": 0.02, "label2id": {"LABEL_0": 0}, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 6, "n_positions": 1024, "output_past": True,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_type": "cls_index", "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "dolly-v2-3b": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "classifier_dropout": 0.1, "attention_bias": True, "hidden_size": 2560, "initializer_range": 0.02,
        "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox",
        "num_attention_heads": 32, "num_hidden_layers": 32, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_parallel_residual": True,
        "gradient_checkpointing": False, "rope_scaling": None, "vocab_size": 50280,
        "custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.InstructionTextGenerationPipeline"}},
    },
    "Hunyuan-0.5B-Instruct": USUAL | {
        "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "attention_bias": False,
        "add_classification_head": False, "attention_dropout": 0.0, "attention_head_dim": 128, "bos_token_id": 1,
        "cla_share_factor": 2, "class_num": 0, "dense_list": [1024, 0], "eod_token_id": 127967, "eos_token_id": 127960,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "im_end_id": 5, "im_newline_id": 11,
        "im_start_id": 4, "intermediate_size": 3584, "mask_init_id": 12, "max_position_embeddings": 32768,
        "mlp_bias": False, "norm_type": "hf_rms", "num_attention_heads": 8, "num_experts": 1, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "org_vocab_size": 120818, "pad_id": 127961, "pad_token_id": 127961,
        "pool_type": "last", "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sep_token_id": 127962,
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "type": "dynamic"},
        "text_end_id": 7, "text_start_id": 6, "tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True,
        "use_rotary_pos_emb": True, "vocab_size": 120818,
    },
    "MiniCPM4-0.5B": USUAL | {
        "architectures": ["MiniCPMForCausalLM"], "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"},
        "bos_token_id": 1, "eos_token_id": [2, 73440], "pad_token_id": 2, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 4096, "max_position_embeddings": 32768, "model_type": "minicpm", "num_attention_heads": 16,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "longrope", "long_factor": [1.1] * 32, "short_factor": [1.0] * 32,
                         "original_max_position_embeddings": 32768},
        "vocab_size": 73448, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "tie_word_embeddings": True,
        "mup_denominator": 32, "attention_bias": False, "attention_dropout": 0.0, "pretraining_tp": 1,
    },
    "Phi-4-mini-instruct": USUAL | {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 199999,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0, "eos_token_id": 199999,
        "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {"long_factor": [1.1] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "SmolLM2-1.7B-Instruct": USUAL | {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 24, "num_key_value_heads": 32, "pad_token_id": 2, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 130000, "tie_word_embeddings": True,
        "is_llama_config": True, "rope_interleaved": False, "vocab_size": 49152,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "opt-350m": {
        "activation_dropout": 0.0, "activation_function": "relu", "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": False, "dropout": 0.1, "eos_token_id": 2,
        "ffn_dim": 4096, "hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
        "model_type": "opt", "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1, "prefix": "</s>",
        "torch_dtype": "float16", "use_cache": True, "vocab_size": 50272, "word_embed_proj_dim": 512,
    },
    "gpt-j-6b": {
        "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
        "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16,
        "n_inner": None, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64,
        "scale_attn_weights": True, "summary_activation": None, "summary_use_proj": True, "tie_word_embeddings": False,
        "task_specific_params": {"text-generation": {"do_sample": True}}, "tokenizer_class": "GPT2Tokenizer",
        "transformers_version": "4.18.0.dev0", "use_cache": True, "vocab_size": 50400,
    },
    "phi-2": USUAL | {
        "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
        "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560, "intermediate_size": 10240,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "qk_layernorm": False,
        "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": 51200,
    },
}  # fmt: skip
