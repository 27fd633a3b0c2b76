"""Architectures of GGUF files whose layers keep a state, most of them next to layers with attention.

A file has no list of kinds of layers. A layer without attention has no key/value heads, and one without a feed-forward
has width 0. Files of Qwen mark layers with a state."""

from __future__ import annotations

import numpy as np

from pace.checkpoints.gguf.architectures.architecture import Architecture, Fields, Key, Keys
from pace.checkpoints.gguf.architectures.changes import (
    FULL,
    ROTATES_ALL,
    granite,
    latent,
    layers_of,
    only_sigmoids,
    shortest,
)
from pace.checkpoints.gguf.architectures.forms import (
    AS_IT_IS,
    FILTERS,
    ONE_ROW,
    PLUS_ONE,
    POSITIVE_RATES,
    RATES,
    RATES_OF_HEADS,
    VECTOR,
    Form,
)
from pace.checkpoints.gguf.architectures.mixtures import DEEPSEEK, SIZED_EXPERTS
from pace.checkpoints.gguf.architectures.names import (
    BAILING_HYBRID,
    BAMBA,
    FALCON_H1,
    GRANITE_HYBRID,
    KIMI_LINEAR,
    LFM2,
    MAMBA2,
    NEMOTRON_H,
    QWEN3_NEXT,
)

CONVOLUTION, LINEAR, MLP, MIXTURE = "conv", "linear_attention", "mlp", "moe"


def kinds(fields: Fields, keys: Keys, other: str) -> list[str]:
    """Returns the kind of each layer: full attention, or `other` for those without key/value heads."""
    groups = keys.per_layer("attention.head_count_kv", len(layers_of(fields)))
    return [FULL if count else other for count in groups]


def lfm2(fields: Fields, keys: Keys) -> Fields:
    types = kinds(fields, keys, CONVOLUTION)
    return only_sigmoids(fields, keys) | {"layer_types": types, "conv_bias": keys.has_tensor("conv.in_proj.bias")}


def delta_rule(fields: Fields, keys: Keys) -> Fields:
    """Sets the kinds of layers, as in llama.cpp: every fourth has full attention if a file does not state them."""
    layers, every = layers_of(fields), keys.integer("full_attention_interval", 4)
    if every < 1:
        raise ValueError(f"{keys.path}: {keys.prefix}full_attention_interval must be positive; got {every}")
    recurrent = [(layer + 1) % every for layer in layers]
    if "attention.recurrent_layers" in keys:
        recurrent = keys.per_layer("attention.recurrent_layers", len(layers))
    return fields | {
        "layer_types": [LINEAR if keeps_state else FULL for keeps_state in recurrent],
        "linear_value_head_dim": head_dim(keys),
        "attention_bias": keys.has_tensor("self_attn.q_proj.bias"),
    }


def qwen35(fields: Fields, keys: Keys) -> Fields:
    return delta_rule(fields, keys) | {"value_heads_tiled": True}


def kimi_linear(fields: Fields, keys: Keys) -> Fields:
    """Layers of the delta rule have the number of heads of those with attention."""
    found = latent(only_sigmoids(fields, keys), keys, keys.read("attention.key_length_mla"))
    return found | {
        "v_head_dim": keys.read("attention.value_length_mla"),
        "layer_types": kinds(fields, keys, LINEAR),
        "linear_num_heads": fields["num_attention_heads"],
    }


def bailingmoe3(fields: Fields, keys: Keys) -> Fields:
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        if np.any(keys.get(name, 0)):
            raise keys.refused(f"bailingmoe3.{name} is not implemented")
    lower_bound = shortest(keys.required(name := "kda.gate_lower_bound", keys.number(name)))
    return kimi_linear(fields, keys) | {"kda_lower_bound": lower_bound}


def head_dim(keys: Keys) -> int:
    """Width of a head of a recurrence."""
    heads, inner = keys.read("ssm.time_step_rank"), keys.read("ssm.inner_size")
    if heads < 1 or inner % heads:
        raise ValueError(
            f"{keys.path}: {keys.prefix}ssm.inner_size must be a multiple of ssm.time_step_rank; got {inner} and "
            f"{heads}"
        )
    return inner // heads


def mamba(fields: Fields, keys: Keys) -> Fields:
    """Adds fields of Mamba-2 as in Bamba, Granite and Falcon-H1."""
    return fields | {
        "mamba_d_head": head_dim(keys),
        "mamba_expand": keys.read("ssm.inner_size") // fields["hidden_size"],
        "mamba_conv_bias": keys.has_tensor("mamba.conv1d.bias"),
        "mamba_proj_bias": keys.has_tensor("mamba.in_proj.bias"),
        "attention_bias": keys.has_tensor("self_attn.q_proj.bias"),
    }


def bamba(fields: Fields, keys: Keys) -> Fields:
    types = kinds(fields, keys, LINEAR)
    return mamba(fields, keys) | {"attn_layer_indices": [layer for layer, kind in enumerate(types) if kind == FULL]}


def granite_hybrid(fields: Fields, keys: Keys) -> Fields:
    """llama.cpp's name for "does not rotate" is a context that is not finetuned."""
    rotates = keys.flag("rope.scaling.finetuned", True)
    return mamba(granite(fields, keys), keys) | {
        "layer_types": kinds(fields, keys, LINEAR),
        "position_embedding_type": "rope" if rotates else None,
    }


def falcon_h1(fields: Fields, keys: Keys) -> Fields:
    """Files have the factors of Falcon-H1 in their weights. A norm comes after the gates, as in llama.cpp."""
    return mamba(fields, keys) | {
        "mamba_d_ssm": keys.read("ssm.inner_size"),
        "mamba_rms_norm": keys.has_tensor("mamba.norm.weight"),
        "mamba_norm_before_gate": False,
    }


def mamba2(fields: Fields, keys: Keys) -> Fields:
    return fields | {
        "head_dim": head_dim(keys),
        "expand": keys.read("ssm.inner_size") // fields["hidden_size"],
        "use_conv_bias": keys.has_tensor("mixer.conv1d.bias"),
        "use_bias": keys.has_tensor("mixer.in_proj.bias"),
        "layer_norm_epsilon": fields["rms_norm_eps"],
    }


def nemotron_h(fields: Fields, keys: Keys) -> Fields:
    """A layer has heads, or a state, or a feed-forward. The converter states no width of feed-forwards that a
    config.json calls "mlp", as transformers does. Their tensors show it."""
    types = kinds(fields, keys, LINEAR)
    widths = {}
    for layer in layers_of(fields):
        mixer = f"model.layers.{layer}.mixer"
        if f"{mixer}.gate.weight" in keys.shapes:
            types[layer] = MIXTURE
        elif up := keys.shapes.get(f"{mixer}.up_proj.weight"):
            types[layer], widths[layer] = MLP, up[0]
    return fields | {
        "layer_types": types,
        "intermediate_size": next(iter(widths.values()), fields["intermediate_size"]),
        "mamba_head_dim": head_dim(keys),
        "use_conv_bias": keys.has_tensor("mixer.conv1d.bias"),
        "use_bias": keys.has_tensor("mixer.in_proj.bias"),
        "mlp_bias": keys.has_tensor("mixer.up_proj.bias"),
        "moe_latent_size": keys.integer("moe_latent_size"),
    }


DELTA_RULE = {
    "linear_conv_kernel_dim": Key("ssm.conv_kernel"),
    "linear_key_head_dim": Key("ssm.state_size"),
    "linear_num_key_heads": Key("ssm.group_count"),
    "linear_num_value_heads": Key("ssm.time_step_rank"),
}
DELTA_FORMS = {
    "linear_attn.norm.weight": AS_IT_IS,
    "norm.weight": PLUS_ONE,
    "linear_attn.A_log": RATES,
    "linear_attn.conv1d.weight": FILTERS,
    "mlp.shared_expert_gate.weight": ONE_ROW,
}
QWEN_EXPERTS = {**SIZED_EXPERTS, "shared_expert_intermediate_size": Key("expert_shared_feed_forward_length")}
KIMI = {
    **DEEPSEEK,
    "n_shared_experts": Key("expert_shared_count"),
    "norm_topk_prob": Key("expert_weights_norm", True),
    "linear_head_dim": Key("kda.head_dim"),
    "linear_conv_kernel_dim": Key("ssm.conv_kernel"),
}
SHORT_CONVOLUTIONS = {"conv.conv.weight": FILTERS}
LENGTH = {"conv_L_cache": Key("shortconv.l_cache")}


def mamba_forms(prefix: str) -> dict[str, Form]:
    return {
        f"{prefix}.A_log": RATES,
        f"{prefix}.D": VECTOR,
        f"{prefix}.norm.weight": VECTOR,
        f"{prefix}.conv1d.weight": FILTERS,
    }


MAMBA = {
    "mamba_d_conv": Key("ssm.conv_kernel"),
    "mamba_d_state": Key("ssm.state_size"),
    "mamba_n_groups": Key("ssm.group_count"),
    "mamba_n_heads": Key("ssm.time_step_rank"),
}
NEMOTRON = {
    "conv_kernel": Key("ssm.conv_kernel"),
    "ssm_state_size": Key("ssm.state_size"),
    "n_groups": Key("ssm.group_count"),
    "mamba_num_heads": Key("ssm.time_step_rank"),
}
NO_ROTATION = ("rope_theta", "partial_rotary_factor")

HYBRIDS = (
    Architecture(
        "lfm2", "lfm2", names=LFM2, mixed=True, forms=SHORT_CONVOLUTIONS, keys=LENGTH, convert=lfm2,
        defaults={"block_auto_adjust_ff_dim": False},
    ),
    Architecture(
        "lfm2moe", "lfm2_moe", names=LFM2, mixed=True, forms=SHORT_CONVOLUTIONS, convert=lfm2,
        keys={
            **LENGTH,
            **SIZED_EXPERTS,
            "num_dense_layers": Key("leading_dense_block_count", 0),
            "norm_topk_prob": Key("expert_weights_norm", True),
            "routed_scaling_factor": Key("expert_weights_scale", 1.0),
        },
    ),
    Architecture(
        "kimi-linear", "kimi_linear", names=KIMI_LINEAR, mixed=True, latent=True, convert=kimi_linear,
        forms={"self_attn.A_log": RATES_OF_HEADS, "conv1d.weight": FILTERS},
        keys=KIMI,
    ),
    Architecture(
        "bailingmoe3", "bailing_hybrid", names=BAILING_HYBRID, mixed=True, latent=True, convert=bailingmoe3,
        forms={"self_attn.A_log": POSITIVE_RATES, "conv1d.weight": FILTERS},
        keys={**KIMI, "kda_safe_gate": Key("kda.safe_gate", True)},
    ),
    Architecture(
        "qwen3next", "qwen3_next", names=QWEN3_NEXT, forms=DELTA_FORMS, convert=delta_rule,
        defaults={**ROTATES_ALL, "qkvz_by_head": False},
        keys={**DELTA_RULE, **QWEN_EXPERTS, "norm_topk_prob": Key("expert_weights_norm", True)},
    ),
    # `use_mrope` splits frequencies among three positions, which are equal for text.
    Architecture(
        "qwen35", "qwen3_5", names=QWEN3_NEXT, forms=DELTA_FORMS, defaults=ROTATES_ALL, keys=DELTA_RULE,
        absent=("use_mrope",), convert=qwen35,
    ),
    Architecture(
        "qwen35moe", "qwen3_5_moe", names=QWEN3_NEXT, forms=DELTA_FORMS, defaults=ROTATES_ALL, convert=qwen35,
        keys={**DELTA_RULE, **QWEN_EXPERTS}, absent=("use_mrope", "intermediate_size"),
    ),
    # The marker is a key of Granite. Bamba's files have the same architecture.
    Architecture(
        "granitehybrid", "granitemoehybrid", marker="granitehybrid.expert_shared_feed_forward_length", permuted=True,
        names=GRANITE_HYBRID, mixed=True, forms=mamba_forms("mamba"), defaults={"shared_split": True},
        keys={
            **MAMBA,
            "num_experts": Key("expert_count", 0),
            "num_experts_per_tok": Key("expert_used_count", 0),
            "shared_intermediate_size": Key("expert_shared_feed_forward_length"),
        },
        convert=granite_hybrid,
    ),
    Architecture(
        "granitehybrid", "bamba", names=BAMBA, permuted=True, mixed=True, forms=mamba_forms("mamba"), keys=MAMBA,
        defaults=ROTATES_ALL, convert=bamba,
    ),
    Architecture("falcon-h1", "falcon_h1", names=FALCON_H1, forms=mamba_forms("mamba"), keys=MAMBA, convert=falcon_h1),
    Architecture(
        "mamba2", "mamba2", names=MAMBA2, forms=mamba_forms("mixer"), mixed=True, attends=False, convert=mamba2,
        keys={
            "conv_kernel": Key("ssm.conv_kernel"),
            "state_size": Key("ssm.state_size"),
            "n_groups": Key("ssm.group_count"),
            "num_heads": Key("ssm.time_step_rank"),
        },
        absent=("num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps", *NO_ROTATION),
    ),
    Architecture(
        "nemotron_h", "nemotron_h", names=NEMOTRON_H, permuted=True, mixed=True, forms=mamba_forms("mixer"),
        layer_norms="layer_norm_epsilon", keys=NEMOTRON, absent=NO_ROTATION, convert=nemotron_h,
    ),
    Architecture(
        "nemotron_h_moe", "nemotron_h", names=NEMOTRON_H, permuted=True, mixed=True, forms=mamba_forms("mixer"),
        layer_norms="layer_norm_epsilon", absent=NO_ROTATION, convert=nemotron_h,
        keys={
            **NEMOTRON,
            **SIZED_EXPERTS,
            "moe_shared_expert_intermediate_size": Key("expert_shared_feed_forward_length"),
            "n_shared_experts": Key("expert_shared_count", 1),
            "norm_topk_prob": Key("expert_weights_norm", True),
            "routed_scaling_factor": Key("expert_weights_scale", 1.0),
            "n_group": Key("expert_group_count", 1),
            "topk_group": Key("expert_group_used_count", 1),
        },
    ),
)  # fmt: skip
