"""Every architecture and config variant that is tested: one tuple each, made into a tiny random checkpoint."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.llm.models import references
from tests.llm.models.families.dense_variants import DENSE_BASE, DENSES
from tests.llm.models.families.gemma4_variants import GEMMA4, GEMMA4_BASE
from tests.llm.models.families.latent_variants import LATENT_BASE, LATENTS
from tests.llm.models.families.mixture_variants import MIXTURE_BASE, MIXTURES
from tests.llm.models.families.older_variants import OLDER, OLDER_BASE, WITHOUT_POSITIONS, WITHOUT_WIDTH
from tests.llm.models.families.windowed_variants import WINDOWED, WINDOWED_BASE
from tests.llm.models.rotations import LLAMA3, YARN, YARN_PUBLISHED, YARN_WIDE, by_kind, longrope, mrope, rope
from tests.llm.models.states.hybrid_variants import HYBRID_BASE, HYBRID_ROUTED, HYBRIDS
from tests.llm.models.states.mamba_variants import MAMBA_BASE, MAMBA_ROUTED, MAMBAS

MAX_POSITIONS = 80
PROMPT = 45
"""Number of prompt tokens. More than the windows and the original lengths of most variants, and no multiple of a
block."""


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
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 3, "sliding_window": 7,
        "query_pre_attn_scalar": 10,
    },
    **DENSE_BASE,
    **LATENT_BASE,
    **MIXTURE_BASE,
    **WINDOWED_BASE,
    **OLDER_BASE,
    **HYBRID_BASE,
    **MAMBA_BASE,
    "gemma3_text": {
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 7, "sliding_window": 7,
        "query_pre_attn_scalar": 10,
    },
    "gemma3": {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 7},
    **GEMMA4_BASE,
    "smollm3": {"num_key_value_heads": 2, "num_hidden_layers": 4, "pad_token_id": 0},
    "granite": {
        "num_key_value_heads": 2, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "bitnet": {"num_key_value_heads": 2},
    "olmo2": {"num_key_value_heads": 2},
    "olmo3": {"num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 7},
    "glm": {"num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0},
    "glm4": {"num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 12},
    "hunyuan_v1_dense": {"num_key_value_heads": 2, "head_dim": 12},
    "cohere": {"num_key_value_heads": 2},
    "cohere2": {"num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 7},
    "minicpm": {"num_key_value_heads": 2, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 8},
    "starcoder2": {"num_key_value_heads": 2},
    "stablelm": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "gpt2": {"n_inner": 56},
    "chatglm": {"kv_channels": 8, "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True},
    "qwen2_vl": {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, **mrope([1, 1, 2])},
    "qwen2_5_vl": {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, **mrope([1, 1, 2])},
    "qwen3_vl": {"num_key_value_heads": 2, "head_dim": 12, **mrope([2, 2, 2])},
}  # fmt: skip
"""Config fields that differ from `SIZES`, by model_type."""

ROUTED = {*MIXTURE_BASE, *WINDOWED_BASE, *HYBRID_ROUTED, *MAMBA_ROUTED} | LATENT_BASE.keys() - {"minicpm3"}
"""The model_types with experts."""

TOWER = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
QWEN_TOWER = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
}  # fmt: skip
DEEPSTACK = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
VISION = {
    "gemma3": {**TOWER, "model_type": "siglip_vision_model", "image_size": 16},
    "gemma4": {
        **TOWER, "num_key_value_heads": 2, "head_dim": 4, "pooling_kernel_size": 2, "position_embedding_size": 16,
    },
    "kimi_k25": {**TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
    "llama4": {
        **TOWER, "intermediate_size": 32, "image_size": 16, "vision_output_dim": 12, "projector_input_dim": 12,
        "projector_output_dim": 12,
    },
    "llava": {**TOWER, "image_size": 16},
    "mistral3": {**TOWER, "head_dim": 4, "image_size": 16},
    "qwen2_vl": {"depth": 1, "embed_dim": 8, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
    "qwen2_5_vl": QWEN_TOWER,
    "qwen3_5": {**QWEN_TOWER, "num_position_embeddings": 16},
    "qwen3_vl": {**QWEN_TOWER, **DEEPSTACK},
    "qwen3_vl_moe": {**QWEN_TOWER, **DEEPSTACK},
}  # fmt: skip
"""The `vision_config` of models that also take images and have a `text_config`, by model_type."""

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}  # fmt: skip

VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    # (model_type, name of the variant, config fields)
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
            "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python", "gelu_python_tanh",
            "gelu_accurate", "quick_gelu", "relu",
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
    ("qwen2", "layer_types", {
        "use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
    }),
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
    ("gemma2", "layer_types", {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "tie_word_embeddings": False,
    }),
    ("gemma2", "act-theta", rope({"rope_type": "default", "rope_theta": 500.0}, hidden_activation="silu")),
    ("phi", "qk-norm", {"qk_layernorm": True}),
    ("phi", "gqa", rope({"rope_type": "default", "partial_rotary_factor": 0.25}, num_key_value_heads=2)),
    *DENSES,
    *LATENTS,
    *MIXTURES,
    *WINDOWED,
    *OLDER,
    *HYBRIDS,
    *MAMBAS,
    ("llama", "falcon3", rope({"rope_type": "default", "rope_theta": 1000042}, head_dim=256, num_key_value_heads=1)),
    ("gemma3_text", "default", {}),
    ("gemma3_text", "linear", by_kind({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, {"rope_theta": 1e4})),
    ("gemma3_text", "theta", by_kind({"rope_theta": 300.0}, {"rope_theta": 40.0}, tie_word_embeddings=False)),
    ("gemma3_text", "caps", {"final_logit_softcapping": 4.0, "attn_logit_softcapping": 3.0, "attention_bias": True}),
    ("gemma3_text", "pattern", {"sliding_window_pattern": 3, "num_hidden_layers": 4, "head_dim": 20}),
    ("gemma3_text", "layer_types", {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}),
    ("gemma3", "default", {}),
    ("gemma3", "caps", {"final_logit_softcapping": 4.0}),
    *GEMMA4,
    ("smollm3", "default", {}),
    ("smollm3", "no_rope_layers", {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False}),
    ("smollm3", "interval", {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}),
    ("smollm3", "window", {"use_sliding_window": True, "sliding_window": 7, "no_rope_layer_interval": 2}),
    ("smollm3", "window-unused", {"sliding_window": 7}),
    ("smollm3", "yarn", rope(YARN)),
    ("granite", "default", {}),
    ("granite", "tied-bias", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("granite", "theta", rope({"rope_type": "default", "rope_theta": 500.0}, residual_multiplier=1.0)),
    ("bitnet", "default", {}),
    ("bitnet", "tied-bias-silu", {"tie_word_embeddings": True, "attention_bias": True, "hidden_act": "silu"}),
    ("olmo2", "default", {}),
    ("olmo2", "mha-bias", {"num_key_value_heads": None, "attention_bias": True, "clip_qkv": 0.1}),
    ("olmo2", "tied-theta", rope({"rope_type": "default", "rope_theta": 500.0}, tie_word_embeddings=True)),
    ("olmo3", "default", {}),
    ("olmo3", "yarn", by_kind({**YARN, "rope_theta": 5e5}, {"rope_theta": 5e5})),
    (
        "olmo3",
        "published-yarn",  # the factors of the 7B; with 8 pairs per head, the ramp lies inside the head
        by_kind({**YARN_PUBLISHED, "rope_theta": 5e5}, {"rope_theta": 5e5}, hidden_size=64),
    ),
    ("olmo3", "theta", by_kind({"rope_theta": 300.0}, {"rope_theta": 40.0})),
    ("olmo3", "layer_types", {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}),
    ("glm", "default", {}),
    ("glm", "no-bias", {"attention_bias": False, "num_key_value_heads": 4}),
    ("glm", "partial-tied", rope({"rope_type": "default", "partial_rotary_factor": 1.0}, tie_word_embeddings=True)),
    ("glm4", "default", {}),
    ("glm4", "no-bias", {"attention_bias": False, "head_dim": 16}),
    ("ernie4_5", "default", {}),
    ("ernie4_5", "bias-untied", {"use_bias": True, "tie_word_embeddings": False, "head_dim": None}),
    ("hunyuan_v1_dense", "default", {}),
    ("hunyuan_v1_dense", "alpha", rope({"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0})),
    ("hunyuan_v1_dense", "bias-tied", {"attention_bias": True, "tie_word_embeddings": True}),
    ("cohere", "default", {}),
    ("cohere", "qk_norm", {"use_qk_norm": True, "logit_scale": 0.8}),
    ("cohere", "bias-untied", {
        "attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": None, "logit_scale": 1.5,
    }),
    ("cohere2", "default", {}),
    ("cohere2", "pattern", {"sliding_window_pattern": 2, "logit_scale": 0.8, "attention_bias": True}),
    ("cohere2", "all-full", {"layer_types": ["full_attention"] * 4, "logit_scale": 0.8}),
    (
        "cohere2",
        "theta",
        rope({"rope_type": "default", "rope_theta": 500.0}, tie_word_embeddings=False, logit_scale=0.8),
    ),
    ("minicpm", "default", {}),
    ("minicpm", "untied-theta", {"tie_word_embeddings": False, "rope_theta": 500.0}),
    ("starcoder2", "default", {}),
    ("starcoder2", "window", {"sliding_window": 7, "norm_epsilon": 0.1}),
    ("starcoder2", "no-bias", {"use_bias": False}),
    ("starcoder2", "untied-act", {"tie_word_embeddings": False, "hidden_act": "gelu"}),
    ("starcoder2", "head_dim-theta", rope({"rope_type": "default", "rope_theta": 500.0}, head_dim=20)),
    ("starcoder2", "yarn", rope(YARN)),
    ("stablelm", "default", {}),
    ("stablelm", "bias-theta", rope({"rope_type": "default", "rope_theta": 500.0}, use_qkv_bias=True)),
    ("stablelm", "parallel", {"use_parallel_residual": True, "num_key_value_heads": 4}),
    ("stablelm", "2-12b", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": False}),
    ("stablelm", "mqa", {"qk_layernorm": True, "num_key_value_heads": 1}),
    ("stablelm", "partial", rope({"rope_type": "default", "partial_rotary_factor": 0.5}, tie_word_embeddings=True)),
    ("stablelm", "yarn", rope({**YARN, "partial_rotary_factor": 0.75}, layer_norm_eps=0.1)),
    ("gpt_neox", "default", {}),
    ("gpt_neox", "sequential", {"use_parallel_residual": False}),
    ("gpt_neox", "no-bias", {"attention_bias": False, "hidden_act": "gelu_new"}),
    (
        "gpt_neox",
        "partial-tied",
        rope({"rope_type": "default", "partial_rotary_factor": 0.5}, tie_word_embeddings=True),
    ),
    ("gpt_neox", "all-linear", rope({"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 1.0})),
    ("gpt2", "default", {}),
    ("gpt2", "n_inner-untied", {"n_inner": None, "tie_word_embeddings": False}),
    ("gpt2", "act", {"activation_function": "relu", "layer_norm_epsilon": 0.1}),
    ("gpt2", "scale", {"scale_attn_weights": False}),
    ("gpt2", "scale-by-layer", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("chatglm", "default", {}),
    ("chatglm", "no-bias", {"add_qkv_bias": False, "multi_query_group_num": 1}),
    ("chatglm", "linear-bias", {"add_bias_linear": True, "rope_ratio": 50, "layernorm_epsilon": 0.1}),
    ("chatglm", "halves", {"original_rope": False, "kv_channels": 16, "multi_query_group_num": 4}),
    ("qwen2_vl", "default", {}),
    ("qwen2_5_vl", "default", {}),
    ("qwen2_5_vl", "window-theta", {
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, **mrope([2, 1, 1], rope_theta=500.0),
    }),
    ("qwen3_vl", "default", {}),
    ("qwen3_vl", "bias-theta", {"attention_bias": True, **mrope([2, 2, 2], rope_theta=500.0, mrope_interleaved=True)}),
]  # fmt: skip

FAMILIES = tuple(BASE)
IN_TRANSFORMERS = tuple(family for family in FAMILIES if family not in references.MODELS)

IDS = [f"{model_type}-{special}" for model_type, special, _ in VARIANTS]


def config_fields(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the text fields of the config.json of a variant with these special `fields`."""
    without = {"intermediate_size"} if model_type in ("opt", "gptj", "gpt2", *WITHOUT_WIDTH) else set()
    if model_type in WITHOUT_POSITIONS:
        without.add("max_position_embeddings")
    if model_type == "mamba2":
        without = {"intermediate_size", "num_attention_heads", "max_position_embeddings"}
    if model_type == "nemotron_h":
        without = {"num_hidden_layers"}
    return {name: size for name, size in SIZES.items() if name not in without} | BASE[model_type] | fields


def make_oracle(model_type: str, fields: dict[str, Any]) -> torch.nn.Module:
    """Returns transformers' model in float32, or the one in `references` for families that transformers lacks."""
    if model_type in references.MODELS:
        return references.MODELS[model_type](fields)
    from transformers import AutoConfig

    if model_type in VISION:
        fields = {"text_config": fields, "vision_config": VISION[model_type]}
    config = AutoConfig.for_model(
        model_type, **{name: value for name, value in fields.items() if not name.startswith("_")}
    )
    for name, value in fields.items():
        if name.startswith("_"):
            setattr(config, name, value)
    return as_published(auto_class(model_type).from_config(config, dtype=torch.float32))


def load_oracle(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Loads the model that `save_tiny` saved."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    if model_type in references.MODELS:
        return references.MODELS[model_type].from_pretrained(folder).to(dtype).eval()
    return text_part(as_published(auto_class(model_type).from_pretrained(folder, dtype=dtype).eval()))


def text_part(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model whose forward gives logits of texts. It differs for Llama 4: transformers 5.24 expects an image
    output there, and fails without images."""
    return model.language_model if model.config.model_type == "llama4" else model


def as_published(model: torch.nn.Module) -> torch.nn.Module:
    """Makes Phi-3.5-MoE behave as published: transformers 5.24 detects a long sequence but then uses the frequencies
    for short ones. Makes the gated delta rule exact: transformers computes prompts in chunks. Their rounding was up to
    3.5e-5 of the largest logit in repetitive texts. The form for single tokens serves prompts, too."""
    if model.config.model_type == "phimoe":
        rotary = model.model.rotary_emb
        # bound to this instance, so that a deep copy of the model uses the copy
        rotary.rope_init_fn = types.MethodType(lambda self, config: (self.inv_freq, self.attention_scaling), rotary)
    modeling = sys.modules[type(model).__module__]
    for rule in ("torch_{}_gated_delta_rule", "{}_kimi_delta_attention"):
        if hasattr(modeling, rule.format("chunk")):
            setattr(modeling, rule.format("chunk"), getattr(modeling, rule.format("recurrent")))
    return model


def auto_class(model_type: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if model_type in (*VISION, "mistral4") else AutoModelForCausalLM


def save_tiny(folder: Path, model_type: str, fields: dict[str, Any]) -> torch.nn.Module:
    """Makes the tiny model with `make_oracle`, saves it in float32, and returns it."""
    torch.manual_seed(sum(map(ord, model_type)))
    model = make_oracle(model_type, config_fields(model_type, fields)).eval()
    randomise(model, model_type)
    save_pretrained(model, folder)
    return text_part(model)


def randomise(model: torch.nn.Module, model_type: str) -> None:
    """Makes all weights random, also those of norms and biases, so that a model that forgets one fails. The numbers are
    exact in bfloat16, so that the same checkpoint serves both dtypes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                is_embedding = any(part in name for part in ("embed", "wte", "wpe"))
                inputs = parameter.shape[0 if model_type == "gpt2" else 1]  # GPT-2's matrices are transposed
                spread = 1.0 if is_embedding else 1.5 / inputs**0.5
                parameter.normal_(0.0, spread)
            else:
                adds_one = model_type.startswith(("gemma2", "gemma3"))
                is_around_one = ("norm" in name or "ln_" in name or name.endswith("scale")) and not adds_one
                parameter.normal_(1.0 if is_around_one else 0.0, 0.3)
            parameter.copy_(parameter.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.normal_(1.0 if name.endswith("scalar") else 0.0, 0.3)
                buffer.copy_(buffer.bfloat16())


def save_pretrained(model: torch.nn.Module, folder: Path) -> None:
    """Saves the model without a progress bar and its monitor thread."""
    with mock.patch("transformers.modeling_utils.logging.tqdm", lambda items, **options: items):
        model.save_pretrained(folder)
