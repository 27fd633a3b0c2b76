"""Architectures of GGUF files whose layers keep a state, most of them next to layers with attention.

A file has no list of kinds of layers. A layer without attention has no key/value heads, and one without a feed-forward
has width 0. Files of Qwen mark layers with a state."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.architecture import Architecture, Fields, Key, Keys
from pace.checkpoints.gguf.architectures.changes import FULL
from pace.checkpoints.gguf.architectures.forms import FILTERS
from pace.checkpoints.gguf.architectures.mixtures import SIGMOID, SIZED_EXPERTS
from pace.checkpoints.gguf.architectures.names import LFM2

CONVOLUTION = "conv"


def kinds(fields: Fields, keys: Keys, other: str) -> list[str]:
    """Returns the kind of each layer: full attention, or `other` for those without key/value heads."""
    groups = keys.per_layer("attention.head_count_kv", fields["num_hidden_layers"])
    return [FULL if count else other for count in groups]


def lfm2(fields: Fields, keys: Keys) -> Fields:
    if keys.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise keys.refused("lfm2moe.expert_gating_func other than sigmoid is not implemented")
    return fields | {"layer_types": kinds(fields, keys, CONVOLUTION), "conv_bias": keys.has_tensor("conv.in_proj.bias")}


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
)  # fmt: skip
