"""Architectures of GGUF files with experts.

A file does not state which layers have experts, except for the number of dense layers at the start. Nor does it state
what llama.cpp always does with an architecture's weights. The records supply both.

In llama.cpp, the cached latent of a position is one wide key/value head. All models of DeepSeek's kind have the name
`deepseek2`: V2, V3, GLM-4.7-Flash, Kimi K2, and Youtu, which has no experts."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.architecture import Architecture, Fields, Key, Keys, unchanged
from pace.checkpoints.gguf.architectures.changes import (
    ATTENTION_BIAS,
    EXPERTS,
    FULL,
    ROTATES_ALL,
    SIGMOID,
    SOFTMAX,
    USE_BIAS,
    alternating,
    granite,
    latent,
    layers_of,
    one_window,
    only_sigmoids,
    rotations,
    shortest,
)
from pace.checkpoints.gguf.architectures.forms import ONE_ROW
from pace.checkpoints.gguf.architectures.names import (
    AFTER_ATTENTION,
    BIASED,
    BIASED_EXPERTS,
    FUSED_QKV,
    GRANITE_MOE,
    HUNYUAN_NORMS,
    INDEXER,
    LATENT,
    LLAMA,
    NEXTN,
    SHARED_EXPERTS,
    gated,
)

EXPERTS_OF_MAVERICK = 128
SIZED_EXPERTS = {**EXPERTS, "moe_intermediate_size": Key("expert_feed_forward_length")}
DEEPSEEK = {
    **SIZED_EXPERTS,
    "first_k_dense_replace": Key("leading_dense_block_count", 0),
    "routed_scaling_factor": Key("expert_weights_scale", 1.0),
    "n_group": Key("expert_group_count", 1),
    "topk_group": Key("expert_group_used_count", 1),
}
INDEXED = {
    "index_topk": Key("attention.indexer.top_k"),
    "index_n_heads": Key("attention.indexer.head_count"),
    "index_head_dim": Key("attention.indexer.key_length"),
}
NORMALISED = {"norm_topk_prob": Key("expert_weights_norm", True)}
LIKE_DEEPSEEK = {**DEEPSEEK, **NORMALISED, "n_shared_experts": Key("expert_shared_count", 1)}


def qwen2moe(fields: Fields, keys: Keys) -> Fields:
    inner, shared = (
        keys.shapes.get(f"model.layers.0.mlp.{part}.down_proj.weight", (None,))[-1]
        for part in ("experts", "shared_expert")
    )
    return fields | {
        "moe_intermediate_size": keys.read("expert_feed_forward_length", inner),
        "shared_expert_intermediate_size": keys.read("expert_shared_feed_forward_length", shared),
    }


def granitemoe(fields: Fields, keys: Keys) -> Fields:
    found = granite(fields, keys)
    if shared := keys.integer("expert_shared_feed_forward_length", 0):
        found |= {"shared_intermediate_size": shared, "shared_split": True, "model_type": "granitemoeshared"}
    return found


def gpt_oss(fields: Fields, keys: Keys) -> Fields:
    """Sets the scaling. A file without one has none, but a config.json without one has that of the published models."""
    scaling = fields.get("rope_scaling")
    rope = {"rope_scaling": scaling | {"truncate": False}} if scaling else {"rope_parameters": {"rope_type": "default"}}
    inner = keys.integer("expert_feed_forward_length", fields["intermediate_size"])
    return fields | rope | {"intermediate_size": inner}


def phimoe(fields: Fields, keys: Keys) -> Fields:
    """Uses the file's single scale of the rotation for both short and long sequences."""
    if scaling := fields.get("rope_scaling"):
        scale = scaling["attention_factor"]
        kept = {name: value for name, value in scaling.items() if name != "attention_factor"}
        fields["rope_scaling"] = kept | {"short_mscale": scale, "long_mscale": scale}
    return fields


def llama4_window(fields: Fields, keys: Keys) -> Fields:
    """Handles a window of 0, which means that all layers rotate and see all positions."""
    layers = len(layers_of(fields))
    rotates_all = keys.integer("attention.sliding_window") == 0
    return fields | ({"no_rope_layers": [1] * layers, "layer_types": [FULL] * layers} if rotates_all else {})


def llama4(fields: Fields, keys: Keys) -> Fields:
    """Sets fields that files do not state, as in the published models: the chunk length, the growth of queries, and
    whether heads are normalised. Only Maverick's are not."""
    return fields | {
        "intermediate_size": keys.read("expert_feed_forward_length"),
        "intermediate_size_mlp": fields["intermediate_size"],
        "use_qk_norm": keys.read("expert_count") != EXPERTS_OF_MAVERICK,
    }


def cohere2moe(fields: Fields, keys: Keys) -> Fields:
    """Sets how experts are weighed, and the width of the dense layers. A file with an epsilon of RMS norms has
    these."""
    gating = keys.integer("expert_gating_func", SIGMOID)
    if gating not in (SOFTMAX, SIGMOID):
        raise keys.refused(f"cohere2moe.expert_gating_func = {gating} is not implemented")
    epsilon = keys.number("attention.layer_norm_rms_epsilon")
    return fields | {
        "rms_norm_eps": None if epsilon is None else shortest(epsilon),
        "expert_selection_fn": "softmax" if gating == SOFTMAX else "sigmoid",
        "prefix_dense_intermediate_size": fields["intermediate_size"],
    }


def mellum(fields: Fields, keys: Keys) -> Fields:
    return rotations(fields, keys.number("rope.freq_base_swa", fields["rope_theta"]))


def deepseek2(fields: Fields, keys: Keys) -> Fields:
    if not keys.integer("expert_count", 0):
        raise keys.refused("deepseek2 without experts is not implemented")
    if keys.number("attention.temperature_scale"):  # Mistral Large 3, from Mistral's own form of checkpoints
        return mistral4(fields, keys) | {"model_type": "mistral4"}
    # Files may not state that scores are sigmoids: the first ones of GLM-4.7-Flash, and those of a config.json without
    # scoring_func, which transformers writes. Only sigmoids have a bias.
    is_biased = keys.has_tensor(".e_score_correction_bias")
    gating = keys.integer("expert_gating_func", SIGMOID if is_biased else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise keys.refused(f"deepseek2.expert_gating_func = {gating} is not implemented")
    kind = {"model_type": "deepseek_v3"}
    if gating == SOFTMAX:
        limited = keys.integer("expert_group_count", 1) > 1
        kind = {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if limited else "greedy"}
    # Files from before kv_b was split by heads have the head lengths under the keys of other families.
    key_length, value_length = (
        keys.read(f"attention.{part}_length_mla", keys.integer(f"attention.{part}_length")) for part in ("key", "value")
    )
    return latent(fields, keys, key_length) | kind | {"v_head_dim": value_length}


def mistral4(fields: Fields, keys: Keys) -> Fields:
    """Adds how queries grow, if the file states it. A file without a scaling has none. A config.json without one has
    that of the published model."""
    if keys.integer("expert_gating_func", SOFTMAX) != SOFTMAX:
        raise keys.refused(f"{keys.prefix}expert_gating_func other than softmax is not implemented for Mistral 4")
    found = latent(fields, keys, keys.read("attention.key_length_mla"))
    found["v_head_dim"] = keys.read("attention.value_length_mla")
    scale, scaling = keys.number("attention.temperature_scale"), found.get("rope_scaling")
    if not scale:
        return found | ({} if scaling else {"rope_parameters": {"rope_type": "default"}})
    if not scaling or scaling["rope_type"] != "yarn":
        raise keys.refused(
            f"{keys.prefix}attention.temperature_scale without rope.scaling.type = 'yarn' is not implemented"
        )
    period = scaling["original_max_position_embeddings"]
    if keys.integer(name := "attention.temperature_length", period) != period:
        raise keys.refused(f"{keys.prefix}{name} other than rope.scaling.original_context_length is not implemented")
    return found | {"rope_scaling": scaling | {"llama_4_scaling_beta": shortest(scale)}}


def indexed(fields: Fields, keys: Keys) -> Fields:
    """A mixture whose tokens see chosen positions. Its scores are sigmoids."""
    return youtu(only_sigmoids(fields, keys), keys)


def youtu(fields: Fields, keys: Keys) -> Fields:
    found = latent(fields, keys, keys.read("attention.key_length_mla"))
    return found | {"v_head_dim": keys.read("attention.value_length_mla")}


MIXTURES = (
    Architecture(
        "qwen2moe", "qwen2_moe", forms={"mlp.shared_expert_gate.weight": ONE_ROW},
        names=LLAMA.but({"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **gated("mlp.shared_expert", "_shexp")}),
        present={"qkv_bias": "blk.0.attn_q.bias"},
        keys={**EXPERTS, "norm_topk_prob": Key("expert_weights_norm", False)}, convert=qwen2moe,
    ),
    Architecture(
        "qwen3moe", "qwen3_moe", present=ATTENTION_BIAS,
        keys={**SIZED_EXPERTS, "norm_topk_prob": Key("expert_weights_norm", True)},
    ),
    # Experts of Qwen3-VL-MoE, and of the thinker of Qwen3-Omni.
    Architecture("qwen3vlmoe", "qwen3_vl_moe", present=ATTENTION_BIAS, keys=SIZED_EXPERTS, absent=("use_mrope",)),
    Architecture(
        "olmoe", "olmoe", present=ATTENTION_BIAS,
        keys={**EXPERTS, "norm_topk_prob": Key("expert_weights_norm", False)},
    ),
    Architecture(
        "granitemoe", "granitemoe", names=GRANITE_MOE, permuted=True, present=ATTENTION_BIAS, keys=EXPERTS,
        convert=granitemoe,
    ),
    Architecture(
        "dbrx", "dbrx", layer_norms="layer_norm_eps", keys=EXPERTS,
        names=LLAMA.but({**FUSED_QKV, "attn_output_norm": "post_attention_layernorm"}),
    ),
    Architecture(
        "gpt-oss", "gpt_oss", present=ATTENTION_BIAS,
        names=LLAMA.but({**AFTER_ATTENTION, "attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}),
        keys={**EXPERTS, "sliding_window": Key("attention.sliding_window")}, window=unchanged, convert=gpt_oss,
    ),
    Architecture(
        "hunyuan-moe", "hunyuan_v1_moe", present=ATTENTION_BIAS, keys=EXPERTS,
        names=LLAMA.but({**HUNYUAN_NORMS, "ffn_gate_inp": "mlp.gate.wg", **gated("mlp.shared_mlp", "_shexp")}),
    ),
    Architecture(
        "ernie4_5-moe", "ernie4_5_moe", present=USE_BIAS,
        forms={"mlp.moe_statics.e_score_correction_bias": ONE_ROW},
        names=BIASED.but({"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}),
        keys={
            **SIZED_EXPERTS,
            "moe_num_shared_experts": Key("expert_shared_count", 0),
            "moe_layer_start_index": Key("leading_dense_block_count", 0),
            "moe_layer_interval": Key("interleave_moe_layer_step", 1),
        },
    ),
    Architecture(
        "glm4moe", "glm4_moe", defaults=ROTATES_ALL, convert=only_sigmoids,
        names=BIASED.but({**AFTER_ATTENTION, **NEXTN}),
        present={**ATTENTION_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"}, keys=LIKE_DEEPSEEK,
    ),
    Architecture(
        "phimoe", "phimoe", present={**ATTENTION_BIAS, "lm_head_bias": "output.bias"}, keys=EXPERTS,
        window=one_window, convert=phimoe,
    ),
    Architecture(
        "llama4", "llama4", window=llama4_window, convert=llama4,
        names=LLAMA.but({
            "ffn_gate_inp": "feed_forward.router",
            **gated("feed_forward"),
            **gated("feed_forward.experts", "_exps"),
            **gated("feed_forward.shared_expert", "_shexp"),
        }),
        keys={**EXPERTS, "interleave_moe_layer_step": Key("interleave_moe_layer_step")},
    ),
    Architecture(
        "cohere2moe", "cohere2_moe", layer_norms="layer_norm_eps", present=ATTENTION_BIAS, convert=cohere2moe,
        window=alternating(4, full_first=True), absent=("intermediate_size",),
        names=LLAMA.but(SHARED_EXPERTS),
        keys={
            **EXPERTS,
            "intermediate_size": Key("expert_feed_forward_length"),
            "num_shared_experts": Key("expert_shared_count", 0),
            "first_k_dense_replace": Key("leading_dense_block_count", 0),
            "norm_topk_prob": Key("expert_weights_norm", False),
        },
    ),
    Architecture(
        "mellum", "mellum", present=ATTENTION_BIAS, window=alternating(4), convert=mellum, keys=SIZED_EXPERTS,
    ),
    Architecture(
        "deepseek2", "deepseek_v3", marker="deepseek2.expert_count", latent=True, convert=deepseek2,
        names=LATENT.but({**BIASED_EXPERTS, **NEXTN}),
        keys={
            **DEEPSEEK,
            "num_nextn_predict_layers": Key("nextn_predict_layers", 0),
            "n_shared_experts": Key("expert_shared_count"),
            "norm_topk_prob": Key("expert_weights_norm", False),
        },
    ),
    Architecture(
        "mistral4", "mistral4", latent=True, convert=mistral4,
        names=LATENT.but(SHARED_EXPERTS),
        keys={
            **DEEPSEEK,
            "n_shared_experts": Key("expert_shared_count"),
            "norm_topk_prob": Key("expert_weights_norm", False),
        },
    ),
    *(
        Architecture(
            name, model_type, latent=True, convert=indexed,
            names=LATENT.but({**BIASED_EXPERTS, **NEXTN, **INDEXER}),
            keys={
                **LIKE_DEEPSEEK, **INDEXED,
                "num_nextn_predict_layers": Key("nextn_predict_layers", 0),
                "norm_topk_prob": Key("expert_weights_norm", False),
            },
        )
        for name, model_type in (("deepseek32", "deepseek_v32"), ("glm-dsa", "glm_moe_dsa"))
    ),
    # A file of DeepSeek's architecture without experts is a Youtu.
    Architecture("deepseek2", "youtu", names=LATENT, latent=True, convert=youtu),
)  # fmt: skip
