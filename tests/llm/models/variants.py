"""Every architecture and config variant that must be right: one tuple each, turned into a tiny random checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.llm.models.latent_variants import LATENT_BASE, LATENTS
from tests.llm.models.mixture_variants import MIXTURE_BASE, MIXTURES

MAX_POSITIONS = 64
PROMPT = 45
"""Tokens of the prompt: beyond the windows and the original lengths of the variants that have them, and not a block
multiple."""

BASE = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 12},
    "phi3": {"num_key_value_heads": 4, "pad_token_id": 0, "original_max_position_embeddings": MAX_POSITIONS},
    "opt": {"ffn_dim": 56, "pad_token_id": 1},
    "gptj": {"rotary_dim": 4},
    "phi": {},
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": 3,
        "sliding_window": 7,
        "query_pre_attn_scalar": 10,
    },
    **LATENT_BASE,
    **MIXTURE_BASE,
}
"""What differs from `SIZES`, by model_type."""

ROUTED = MIXTURE_BASE.keys() | LATENT_BASE.keys() - {"minicpm3"}
"""The model_types with experts."""

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_WIDE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
"""With 16 pairs a head, the ramp between kept and stretched frequencies lies inside."""


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    short = [1.0 + 0.1 * i for i in range(pairs)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": [2.0 + i for i in range(pairs)], **more}


def rope(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}, **more}


VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    # (model_type, what is special, config fields)
    ("llama", "gqa", {}),
    ("llama", "mha", {"num_key_value_heads": None}),
    ("llama", "mqa", {"num_key_value_heads": 1}),
    ("llama", "head_dim", {"head_dim": 20}),
    ("llama", "attention_bias", {"attention_bias": True}),
    ("llama", "mlp_bias", {"mlp_bias": True}),
    ("llama", "tied", {"tie_word_embeddings": True}),
    ("llama", "eps", {"rms_norm_eps": 0.1}),
    ("llama", "theta", rope({"rope_type": "default", "rope_theta": 500.0})),
    ("llama", "linear", rope({"rope_type": "linear", "factor": 3.0})),
    ("llama", "dynamic-within", rope({"rope_type": "dynamic", "factor": 2.0})),
    ("llama", "dynamic-beyond", rope({"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=16)),
    ("llama", "llama3", rope(LLAMA3)),
    ("llama", "yarn", rope(YARN)),
    ("llama", "yarn-mscale", rope({**YARN, "mscale": 0.7, "mscale_all_dim": 1.3})),
    ("llama", "yarn-attention_factor", rope({**YARN_WIDE, "attention_factor": 0.8}, head_dim=32)),
    ("llama", "yarn-beta", rope({**YARN_WIDE, "beta_fast": 8.0, "beta_slow": 4.0}, head_dim=32)),
    ("llama", "yarn-no-truncate", rope({**YARN_WIDE, "truncate": False}, head_dim=32)),
    ("llama", "longrope-short", rope(longrope(4, factor=2.0, original_max_position_embeddings=50))),
    ("llama", "longrope-long", rope(longrope(4, original_max_position_embeddings=16))),
    *[
        ("llama", f"act-{name}", {"hidden_act": name})
        for name in (
            "swish",
            "gelu",
            "gelu_new",
            "gelu_fast",
            "gelu_pytorch_tanh",
            "gelu_python",
            "gelu_python_tanh",
            "gelu_accurate",
            "quick_gelu",
            "relu",
        )
    ],
    ("mistral", "no-window", {}),
    ("mistral", "window", {"sliding_window": 7}),
    ("mistral", "window-head_dim", {"sliding_window": 16, "head_dim": 16}),
    ("mistral", "yarn", rope(YARN)),
    ("qwen2", "default", {}),
    ("qwen2", "tied", {"tie_word_embeddings": True}),
    ("qwen2", "window-upper", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen2", "window-unused", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}),
    (
        "qwen2",
        "layer_types",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    ("qwen2", "yarn", rope(YARN)),
    ("qwen3", "default", {}),
    ("qwen3", "bias-tied", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3", "window", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("phi3", "default", {}),
    ("phi3", "window", {"sliding_window": 11}),
    ("phi3", "longrope-short", rope(longrope(4), original_max_position_embeddings=50)),
    ("phi3", "longrope-long", rope(longrope(4), original_max_position_embeddings=16)),
    (
        "phi3",
        "phi-4-mini",
        rope(
            longrope(3, partial_rotary_factor=0.75),
            original_max_position_embeddings=16,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
    ),
    ("phi3", "partial", rope({"rope_type": "default", "partial_rotary_factor": 0.5})),
    ("phi3", "partial-odd", rope({"rope_type": "default", "partial_rotary_factor": 0.7})),  # 5 of 8 elements: 3 pairs
    ("opt", "default", {}),
    ("opt", "350m", {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    ("opt", "post-norm", {"do_layer_norm_before": False}),
    ("opt", "projections", {"word_embed_proj_dim": 20}),
    ("opt", "gelu", {"activation_function": "gelu"}),
    ("opt", "no-bias", {"enable_bias": False}),
    ("opt", "no-affine", {"layer_norm_elementwise_affine": False}),
    ("opt", "no-final-norm", {"_remove_final_layer_norm": True}),
    ("opt", "untied", {"tie_word_embeddings": False}),
    ("gptj", "default", {}),
    ("gptj", "rotate-all", {"rotary_dim": 8}),
    ("gptj", "n_inner", {"n_inner": 24, "activation_function": "gelu"}),
    ("gptj", "tied", {"tie_word_embeddings": True}),
    ("phi", "default", {}),
    ("gemma2", "default", {}),
    ("gemma2", "head_dim", {"head_dim": 20, "query_pre_attn_scalar": 144, "num_key_value_heads": 4}),
    ("gemma2", "no-softcap", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", "low-caps", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    ("gemma2", "four-layers", {"num_hidden_layers": 4, "sliding_window": 16, "attention_bias": True}),
    (
        "gemma2",
        "layer_types",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "tie_word_embeddings": False},
    ),
    ("gemma2", "act-theta", rope({"rope_type": "default", "rope_theta": 500.0}, hidden_activation="silu")),
    ("phi", "gqa", rope({"rope_type": "default", "partial_rotary_factor": 0.25}, num_key_value_heads=2)),
    *LATENTS,
    *MIXTURES,
]

IDS = [f"{model_type}-{special}" for model_type, special, _ in VARIANTS]


def save_tiny(folder: Path, model_type: str, fields: dict[str, Any]) -> torch.nn.Module:
    """Makes the tiny model with transformers, saves it in float32, and returns it.

    All weights are random, those of norms and biases too: a model that forgets one is found out. The numbers fit in
    bfloat16, so that the same checkpoint serves both dtypes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(sum(map(ord, model_type)))
    sizes = {name: size for name, size in SIZES.items() if (name, model_type) not in {("intermediate_size", "opt")}}
    if model_type == "gptj":
        sizes.pop("intermediate_size")
    special = {name: fields[name] for name in fields if name.startswith("_")}
    plain = {name: fields[name] for name in fields if not name.startswith("_")}
    config = AutoConfig.for_model(model_type, **{**sizes, **BASE[model_type], **plain})
    for name, value in special.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                spread = 1.0 if "embed" in name or "wte" in name else 1.5 / parameter.shape[1] ** 0.5
                parameter.normal_(0.0, spread)
            else:
                is_around_one = ("norm" in name or "ln_" in name) and model_type != "gemma2"  # which adds 1
                parameter.normal_(1.0 if is_around_one else 0.0, 0.3)
            parameter.copy_(parameter.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
                buffer.copy_(buffer.bfloat16())
    model.save_pretrained(folder)
    return model
