"""Architectures of GGUF files whose layers keep a state, most of them next to layers with attention.

A file has no list of kinds of layers. A layer without attention has no key/value heads, and one without a feed-forward
has width 0. Files of Qwen mark layers with a state."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.architecture import Architecture, Fields, Key, Keys
from pace.checkpoints.gguf.architectures.changes import FULL, ROTATES_ALL
from pace.checkpoints.gguf.architectures.forms import AS_IT_IS, FILTERS, ONE_ROW, PLUS_ONE, RATES
from pace.checkpoints.gguf.architectures.mixtures import SIGMOID, SIZED_EXPERTS
from pace.checkpoints.gguf.architectures.names import LFM2, QWEN3_NEXT

CONVOLUTION, LINEAR = "conv", "linear_attention"


def kinds(fields: Fields, keys: Keys, other: str) -> list[str]:
    """Returns the kind of each layer: full attention, or `other` for those without key/value heads."""
    groups = keys.per_layer("attention.head_count_kv", fields["num_hidden_layers"])
    return [FULL if count else other for count in groups]


def lfm2(fields: Fields, keys: Keys) -> Fields:
    if keys.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise keys.refused("lfm2moe.expert_gating_func other than sigmoid is not implemented")
    return fields | {"layer_types": kinds(fields, keys, CONVOLUTION), "conv_bias": keys.has_tensor("conv.in_proj.bias")}


def delta_rule(fields: Fields, keys: Keys) -> Fields:
    """Sets the kinds of layers, as in llama.cpp: every fourth has full attention if a file does not state them."""
    layers, every = fields["num_hidden_layers"], keys.integer("full_attention_interval", 4)
    if every < 1:
        raise ValueError(f"{keys.path}: {keys.prefix}full_attention_interval must be positive; got {every}")
    recurrent = [(layer + 1) % every for layer in range(layers)]
    if "attention.recurrent_layers" in keys:
        recurrent = keys.per_layer("attention.recurrent_layers", layers)
    heads, inner = keys.read("ssm.time_step_rank"), keys.read("ssm.inner_size")
    return fields | {
        "layer_types": [LINEAR if keeps_state else FULL for keeps_state in recurrent],
        "linear_value_head_dim": inner // max(1, heads),
        "attention_bias": keys.has_tensor("self_attn.q_proj.bias"),
    }


def qwen35(fields: Fields, keys: Keys) -> Fields:
    return delta_rule(fields, keys) | {"value_heads_tiled": True}


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
SHORT_CONVOLUTIONS = {"conv.conv.weight": FILTERS}
LENGTH = {"conv_L_cache": Key("shortconv.l_cache")}

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
)  # fmt: skip
