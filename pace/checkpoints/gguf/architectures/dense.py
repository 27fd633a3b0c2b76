"""Architectures of GGUF files without experts, and Llama, which may have them."""

from __future__ import annotations

from dataclasses import replace

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
    layers_of,
    one_window,
    rotations,
    shortest,
)
from pace.checkpoints.gguf.architectures.forms import PLUS_ONE, YES_LESS_NO
from pace.checkpoints.gguf.architectures.names import (
    AFTER_ATTENTION,
    CHATGLM,
    GEMMA,
    GLM,
    GLM4,
    GPT2,
    GPT_NEOX,
    GRANITE_MOE_SWA,
    HUNYUAN_NORMS,
    LATENT,
    LLAMA,
    PHI2,
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


def mistral3(fields: Fields, keys: Keys) -> Fields:
    """Adds how queries grow. A Mistral whose queries do not grow has no key for it."""
    scale, scaling = keys.number("attention.temperature_scale"), fields.get("rope_scaling")
    if scale is None:
        return fields | {"model_type": "mistral", "sliding_window": None}
    if not scaling or scaling["rope_type"] != "yarn":
        raise keys.refused("mistral3.attention.temperature_scale without rope.scaling.type = 'yarn' is not implemented")
    mscale = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    magnitudes = {"mscale": 1.0, "mscale_all_dim": shortest(mscale)} if mscale else {}
    return fields | {"rope_scaling": scaling | magnitudes | {"llama_4_scaling_beta": shortest(scale)}}


def exaone4_window(fields: Fields, keys: Keys, layers_of_32b: int = 64) -> Fields:
    """Sets windows. As in llama.cpp, a file of the 32B need not state them."""
    found = alternating(4, default=4096 if fields["num_hidden_layers"] == layers_of_32b else 0)(fields, keys)
    return {"sliding_window": None} | found


def granite_swa(fields: Fields, keys: Keys) -> Fields:
    """Sets the layers that rotate, all with the base of the file. A file may have experts."""
    layers = len(layers_of(fields))
    rotate = keys.per_layer("attention.rope_pattern", layers) if "attention.rope_pattern" in keys else [1] * layers
    found = granite(fields, keys) | {"layer_rope_theta": [fields["rope_theta"] if each else 0 for each in rotate]}
    if not keys.integer("expert_count", 0):
        return found
    return found | {
        "model_type": "granitemoe_swa",
        **{field: keys.read(*key) for field, key in EXPERTS.items()},
        "shared_intermediate_size": keys.integer("expert_shared_feed_forward_length", 0),
    }


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


def qwen3(fields: Fields, keys: Keys) -> Fields:
    """A Qwen3-Reranker has a classifier for the answers "yes" and "no" in place of a head."""
    answers = keys.shapes.get("score.weight")
    if answers is None:
        return fields
    labels = keys.texts("classifier.output_labels")
    if len(answers) != 2 or answers[0] != 1 or labels not in (None, ["yes", "no"]):
        raise keys.refused(
            f"a classifier with cls.output.weight of shape {list(answers)} and the labels {labels} is not implemented "
            "for qwen3; two rows for yes and no are"
        )
    return fields | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "yes"}}


MLP_BIAS = {"mlp_bias": "blk.0.ffn_up.bias"}

DENSE = (
    Architecture("llama", "llama", permuted=True, present=BOTH_BIASES, window=llama_window),
    Architecture("qwen2", "qwen2"),
    Architecture(
        "qwen3", "qwen3", names=replace(LLAMA, outer={**LLAMA.outer, "cls.output": "score"}),
        forms={"score.weight": YES_LESS_NO}, present=ATTENTION_BIAS, convert=qwen3,
    ),
    Architecture(
        "phi2", "phi", names=PHI2, layer_norms="layer_norm_eps", defaults=ROTATES_ALL,
        present={"qkv_fused": "blk.0.attn_qkv.weight"},
    ),
    Architecture("phi3", "phi3", names=PHI3, window=one_window),
    Architecture("gemma", "gemma", forms={"norm.weight": PLUS_ONE}, present=ATTENTION_BIAS),
    Architecture(
        "gemma2", "gemma2", names=GEMMA, forms={"norm.weight": PLUS_ONE}, present=ATTENTION_BIAS,
        window=alternating(2, default=4096), convert=gemma2,
    ),
    Architecture(
        "gemma3", "gemma3_text", names=GEMMA, forms={"norm.weight": PLUS_ONE}, present=ATTENTION_BIAS,
        window=alternating(6), convert=gemma3,
    ),
    Architecture("mistral3", "ministral3", permuted=True, log_multiplier=True, convert=mistral3),
    Architecture(
        "seed_oss", "seed_oss", names=LLAMA.but(AFTER_ATTENTION),
        present={**BOTH_BIASES, "attention_out_bias": "blk.0.attn_output.bias"},
    ),
    Architecture("exaone", "exaone", present=BOTH_BIASES),
    Architecture("exaone4", "exaone4", names=GEMMA, window=exaone4_window),
    Architecture("arcee", "arcee", permuted=True, present={**ATTENTION_BIAS, **MLP_BIAS}),
    Architecture(
        "nemotron", "nemotron", layer_norms="norm_eps", forms={"norm.weight": PLUS_ONE}, defaults=ROTATES_ALL,
        present={**ATTENTION_BIAS, **MLP_BIAS},
    ),
    Architecture("jais2", "jais2", layer_norms="layer_norm_eps", present={**ATTENTION_BIAS, **MLP_BIAS}),
    Architecture("internlm2", "llama", permuted=True, present=BOTH_BIASES),
    # llama.cpp has no key for the activation, which is SiLU there. Inputs are not rounded.
    Architecture(
        "bitnet", "bitnet", defaults={"hidden_act": "silu"}, present=ATTENTION_BIAS,
        names=LLAMA.but({"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}),
    ),
    Architecture("smollm3", "smollm3", permuted=True, present=BOTH_BIASES),
    Architecture("granite", "granite", permuted=True, present=BOTH_BIASES, convert=granite),
    Architecture(
        "granite_swa", "granite_swa", names=GRANITE_MOE_SWA, permuted=True,
        present=BOTH_BIASES, window=alternating(4), convert=granite_swa,
    ),
    Architecture("olmo2", "olmo2", names=GEMMA, present=ATTENTION_BIAS, window=olmo_window),
    Architecture("glm4", "glm4", names=GLM4, defaults=ROTATES_ALL, present=ATTENTION_BIAS),
    # The marker is in GLM-4-9B as published last, whose queries, keys and values are separate tensors.
    Architecture(
        "chatglm", "glm", marker="blk.0.attn_q.weight", names=GLM, defaults=ROTATES_ALL, present=ATTENTION_BIAS,
    ),
    Architecture(
        "chatglm", "chatglm", names=CHATGLM, defaults={"multi_query_attention": True}, convert=chatglm,
        present={"add_qkv_bias": "blk.0.attn_qkv.bias", "add_bias_linear": "blk.0.attn_output.bias"},
    ),
    Architecture("ernie4_5", "ernie4_5", present=USE_BIAS),
    Architecture("paddleocr", "paddleocr_vl", present=USE_BIAS, absent=("use_mrope",)),
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
