"""Architectures of GGUF files with experts that are chosen by biased sigmoids, in attention of the usual form. Those
that have latent attention, and GLM-4-MoE, are in mixtures.py. Files of Sarvam are files of Ling 2, those of Solar-Open
files of GLM-4-MoE."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.architecture import Architecture, Fields, Key, Keys
from pace.checkpoints.gguf.architectures.changes import (
    ATTENTION_BIAS,
    EXPERTS,
    alternating,
    layers_of,
    one_window,
    only_sigmoids,
    rotations,
)
from pace.checkpoints.gguf.architectures.mixtures import LIKE_DEEPSEEK, NORMALISED, SIZED_EXPERTS
from pace.checkpoints.gguf.architectures.names import AFTER_ATTENTION, BIASED, HUNYUAN_NORMS, NEXTN


def bailingmoe2(fields: Fields, keys: Keys) -> Fields:
    return only_sigmoids(fields, keys) | {
        "use_bias": keys.has_tensor("self_attn.o_proj.bias"),
        "use_qk_norm": keys.has_tensor("self_attn.query_layernorm.weight"),
    }


def laguna(fields: Fields, keys: Keys) -> Fields:
    """Sets the number of heads of each layer, and two rotations. The shape of its tensor says whether a gate
    is for heads or for channels."""
    heads = keys.per_layer("attention.head_count", len(layers_of(fields)))
    rows = keys.shapes.get("model.layers.0.self_attn.g_proj.weight", (0,))[0]
    part = keys.integer("rope.dimension_count_swa", keys.integer("rope.dimension_count", fields["head_dim"]))
    found = rotations(
        only_sigmoids(fields, keys),
        keys.number("rope.freq_base_swa", fields["rope_theta"]),
        partial_rotary_factor=part / max(1, fields["head_dim"]),
    )
    dense = min(keys.integer("leading_dense_block_count", 0), len(heads))
    return found | {
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if rows == heads[0] else "per-element",
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (len(heads) - dense),
    }


def hy_v3(fields: Fields, keys: Keys) -> Fields:
    """Sets which layers have experts, by their routers, and the width of the shared MLP in experts."""
    inner = keys.read("expert_feed_forward_length")
    shared = keys.integer("expert_shared_feed_forward_length", inner)
    if inner < 1 or shared % inner:
        raise keys.refused(f"hy_v3.expert_shared_feed_forward_length = {shared} must be a multiple of {inner}")
    has_router = (f"model.layers.{layer}.mlp.gate.weight" in keys.shapes for layer in layers_of(fields))
    return only_sigmoids(fields, keys) | {
        "mlp_layer_types": ["sparse" if experts else "dense" for experts in has_router],
        "n_shared_experts": shared // inner,
    }


BIASED_MIXTURES = (
    Architecture(
        "dots1", "dots1", names=BIASED, present=ATTENTION_BIAS, window=one_window, convert=only_sigmoids,
        keys={**LIKE_DEEPSEEK, "norm_topk_prob": Key("expert_weights_norm", False)},
    ),
    Architecture(
        "bailingmoe2", "bailing_moe_v2", convert=bailingmoe2, keys=LIKE_DEEPSEEK,
        names=BIASED.but({**HUNYUAN_NORMS, "attn_qkv": "self_attn.query_key_value"}),
        present={"use_qkv_bias": "blk.0.attn_qkv.bias"},
    ),
    Architecture(
        "hy_v3", "hy_v3", names=BIASED.but(NEXTN), present=ATTENTION_BIAS, convert=hy_v3,
        keys={**SIZED_EXPERTS, **NORMALISED, "routed_scaling_factor": Key("expert_weights_scale", 1.0)},
    ),
    Architecture("minimax-m2", "minimax_m2", names=BIASED, keys=EXPERTS, convert=only_sigmoids),
    # llama.cpp multiplies embeddings in every file.
    Architecture(
        "afmoe", "afmoe", defaults={"mup_enabled": True}, present=ATTENTION_BIAS, window=alternating(4),
        names=BIASED.but({
            **AFTER_ATTENTION,
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "attn_gate": "self_attn.gate_proj",
        }),
        keys={
            **SIZED_EXPERTS,
            "n_shared_experts": Key("expert_shared_count", 1),
            "num_dense_layers": Key("leading_dense_block_count", 0),
            "route_norm": Key("expert_weights_norm", True),
            "routed_scaling_factor": Key("expert_weights_scale", 1.0),
        },
        convert=only_sigmoids,
    ),
    Architecture(
        "exaone-moe", "exaone_moe", names=BIASED, keys=LIKE_DEEPSEEK, window=alternating(4), convert=only_sigmoids,
    ),
    Architecture(
        "laguna", "laguna", varied=("attention.head_count",), present=ATTENTION_BIAS, convert=laguna,
        window=alternating(4, full_first=True), names=BIASED.but({"attn_gate": "self_attn.g_proj"}),
        keys={
            **SIZED_EXPERTS,
            "shared_expert_intermediate_size": Key("expert_shared_feed_forward_length"),
            "routed_scaling_factor": Key("expert_weights_scale", 1.0),
        },
    ),
)  # fmt: skip
