"""Architectures of GGUF files without experts, and Llama, which may have them."""

from __future__ import annotations

import numpy as np

from pace.checkpoints.gguf.architectures.architecture import Architecture, Fields, Key, Keys
from pace.checkpoints.gguf.architectures.changes import (
    ATTENTION_BIAS,
    BOTH_BIASES,
    EXPERTS,
    ROTATES_ALL,
    USE_BIAS,
    alternating,
    granite,
    latent,
    one_window,
    rotations,
)
from pace.checkpoints.gguf.architectures.forms import PLUS_ONE
from pace.checkpoints.gguf.architectures.names import (
    CHATGLM,
    GEMMA,
    GLM4,
    GPT2,
    GPT_NEOX,
    HUNYUAN_NORMS,
    LATENT,
    LLAMA,
    PHI3,
)


def llama_window(fields: Fields, keys: Keys) -> Fields:
    """Sets the model type: a Llama with experts is a Mixtral, one with a window is a Mistral."""
    window = keys.integer("attention.sliding_window", 0)
    if keys.integer("expert_count", 0):
        kept = {name: value for name, value in fields.items() if name not in BOTH_BIASES}
        experts = {field: keys.read(*key) for field, key in EXPERTS.items()}
        return kept | experts | {"model_type": "mixtral", "sliding_window": window or None}
    if 0 < window < fields["max_position_embeddings"]:
        return fields | {"model_type": "mistral", "sliding_window": window}
    return fields


def olmo_window(fields: Fields, keys: Keys) -> Fields:
    """An OLMo 3 is an OLMo 2 with windows."""
    found = alternating(4)(fields, keys)
    if "sliding_window" not in found:
        return fields
    return rotations(found, keys.number("rope.freq_base_swa", fields["rope_theta"])) | {"model_type": "olmo3"}


def gemma2(fields: Fields, keys: Keys, layers_of_27b: int = 46) -> Fields:
    """Adds the scale of the attention scores. Only the 27B model does not derive it from the head width."""
    is_27b = fields["num_hidden_layers"] == layers_of_27b  # llama.cpp uses the same criterion
    wide = fields["hidden_size"] // fields["num_attention_heads"]
    return fields | {"query_pre_attn_scalar": wide if is_27b else fields["head_dim"]}


def gemma3(fields: Fields, keys: Keys) -> Fields:
    return gemma2(rotations(fields, keys.number("rope.freq_base_swa", 10000.0)), keys, layers_of_27b=62)


def minicpm(fields: Fields, keys: Keys) -> Fields:
    """A file without the factors uses those of the first MiniCPM."""
    branch, logits = keys.number("residual_scale"), keys.number("logit_scale")
    return fields | {
        "scale_depth": 1.4 if branch is None else branch * fields["num_hidden_layers"] ** 0.5,
        "dim_model_base": whole(fields["hidden_size"] / logits) if logits else 256.0,
    }


def whole(value: float) -> float:
    """Rounds a quotient of rounded numbers to the integer it stands for, if it is close to one."""
    near = float(np.round(value))
    return near if abs(value - near) < 1e-4 * value else value


def minicpm3(fields: Fields, keys: Keys) -> Fields:
    """The factors of embeddings, branches and logits are those of the published model, the only one."""
    return latent(fields, keys, keys.read("attention.key_length"))


def gpt2(fields: Fields, keys: Keys) -> Fields:
    return fields | {"n_inner": fields["intermediate_size"]}


def stablelm(fields: Fields, keys: Keys) -> Fields:
    """The key for parallel residuals is wrong if config.json has no such field. llama.cpp checks for the second norm,
    too."""
    return fields | {"use_parallel_residual": "model.layers.0.post_attention_layernorm.weight" not in keys.shapes}


def chatglm(fields: Fields, keys: Keys) -> Fields:
    rotated = fields.pop("partial_rotary_factor", 1.0)
    if rotated != 0.5:
        raise keys.refused(f"chatglm.rope.dimension_count must be half of a head; it is {rotated} of it")
    return fields | {
        "rope_ratio": fields.pop("rope_theta") / 10000,
        "multi_query_group_num": fields.pop("num_key_value_heads"),
    }


DENSE = (
    Architecture("llama", "llama", permuted=True, present=BOTH_BIASES, window=llama_window),
    Architecture("qwen2", "qwen2"),
    Architecture("qwen3", "qwen3", present=ATTENTION_BIAS),
    Architecture("phi3", "phi3", names=PHI3, window=one_window),
    Architecture(
        "gemma2", "gemma2", names=GEMMA, forms={"norm.weight": PLUS_ONE}, present=ATTENTION_BIAS,
        window=alternating(2, default=4096), convert=gemma2,
    ),
    Architecture(
        "gemma3", "gemma3_text", names=GEMMA, forms={"norm.weight": PLUS_ONE}, present=ATTENTION_BIAS,
        window=alternating(6), convert=gemma3,
    ),
    Architecture("smollm3", "smollm3", permuted=True, present=BOTH_BIASES),
    Architecture("granite", "granite", permuted=True, present=BOTH_BIASES, convert=granite),
    Architecture("olmo2", "olmo2", names=GEMMA, present=ATTENTION_BIAS, window=olmo_window),
    Architecture("glm4", "glm4", names=GLM4, defaults=ROTATES_ALL, present=ATTENTION_BIAS),
    # The marker is in GLM-4-9B as published last, whose queries, keys and values are separate tensors.
    Architecture(
        "chatglm", "glm", marker="blk.0.attn_q.weight", names=PHI3, defaults=ROTATES_ALL, present=ATTENTION_BIAS,
    ),
    Architecture(
        "chatglm", "chatglm", names=CHATGLM, defaults={"multi_query_attention": True}, convert=chatglm,
        present={"add_qkv_bias": "blk.0.attn_qkv.bias", "add_bias_linear": "blk.0.attn_output.bias"},
    ),
    Architecture("ernie4_5", "ernie4_5", present=USE_BIAS),
    Architecture("hunyuan-dense", "hunyuan_v1_dense", names=LLAMA.but(HUNYUAN_NORMS), present=ATTENTION_BIAS),
    Architecture(
        "command-r", "cohere", layer_norms="layer_norm_eps",
        present={**ATTENTION_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    Architecture(
        "cohere2", "cohere2", layer_norms="layer_norm_eps", present=ATTENTION_BIAS, window=alternating(4),
    ),
    Architecture(
        "minicpm", "minicpm", permuted=True, keys={"scale_emb": Key("embedding_scale", 12.0)}, convert=minicpm,
        absent=("embedding_multiplier", "residual_multiplier", "logit_scale"),
    ),
    Architecture("minicpm3", "minicpm3", names=LATENT, latent=True, convert=minicpm3),
    Architecture(
        "gpt2", "gpt2", names=GPT2, layer_norms="layer_norm_epsilon", defaults={"matrices_transposed": False},
        absent=("num_key_value_heads", "head_dim", "rope_theta", "intermediate_size"), convert=gpt2,
    ),
    Architecture(
        "gptneox", "gpt_neox", names=GPT_NEOX, layer_norms="layer_norm_eps",
        defaults={**ROTATES_ALL, "qkv_by_head": False}, present={"attention_bias": "blk.0.attn_qkv.bias"},
        keys={"use_parallel_residual": Key("use_parallel_residual", True)}, absent=("num_key_value_heads", "head_dim"),
    ),
    Architecture(
        "starcoder2", "starcoder2", layer_norms="norm_epsilon", present=USE_BIAS,
        names=LLAMA.but({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    ),
    Architecture(
        "stablelm", "stablelm", layer_norms="layer_norm_eps", defaults=ROTATES_ALL, convert=stablelm,
        names=LLAMA.but({"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}),
        present={
            "use_qkv_bias": "blk.0.attn_q.bias",
            **dict.fromkeys(("qk_layernorm", "head_norms_stacked"), "blk.0.attn_q_norm.weight"),
        },
    ),
    # `use_mrope` splits frequencies among three positions, which are equal for text.
    Architecture("qwen2vl", "qwen2_5_vl", absent=("use_mrope",)),
    Architecture("qwen3vl", "qwen3_vl", present=ATTENTION_BIAS, absent=("use_mrope",)),
)  # fmt: skip
