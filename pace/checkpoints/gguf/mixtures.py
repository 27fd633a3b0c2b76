"""Converts the metadata of mixtures of experts to fields of a config.json, in addition to those that config.py reads.

A file does not state which layers have experts, except for the number of dense layers at the start. Nor does it state
what llama.cpp always does with an architecture's weights. This module supplies both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pace.checkpoints.gguf.file import Metadata
from pace.checkpoints.gguf.llama_like import granite

Fields = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by the Hub's names."""
SIGMOID = 2
"""Value of expert_gating_func."""
EXPERTS_OF_MAVERICK = 128


class Keys:
    """Reads the keys of one architecture's experts."""

    def __init__(self, metadata: Metadata, architecture: str):
        self.metadata = metadata
        self.architecture = architecture

    def integer(self, name: str, default: int | None = None) -> int:
        """Raises ValueError if the key is missing and has no default."""
        key = f"{self.architecture}.{name}"
        return self.metadata.required(key, self.metadata.integer(key, default))

    def number(self, name: str, default: float) -> float:
        return self.metadata.number(f"{self.architecture}.{name}", default)

    def flag(self, name: str, default: bool) -> bool:
        return self.metadata.flag(f"{self.architecture}.{name}", default)

    @property
    def counts(self) -> Fields:
        return {"num_experts": self.integer("expert_count"), "num_experts_per_tok": self.integer("expert_used_count")}


def has_experts(metadata: Metadata, architecture: str) -> bool:
    """True if the file states a positive number of experts."""
    return bool(metadata.integer(f"{architecture}.expert_count", 0))


def mixtral(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    """A Mixtral, which llama.cpp calls a Llama with experts."""
    if not has_experts(metadata, "llama"):
        return fields
    keys = Keys(metadata, "llama")
    kept = {name: value for name, value in fields.items() if name not in ("mlp_bias", "attention_bias")}
    window = keys.integer("attention.sliding_window", 0) or None
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": window}
    return kept | keys.counts | mixtral


def qwen2moe(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    keys = Keys(metadata, "qwen2moe")
    inner, shared = (
        tensors.get(f"model.layers.0.mlp.{part}.down_proj.weight", (None,))[-1] for part in ("experts", "shared_expert")
    )
    return (
        fields
        | keys.counts
        | {
            "model_type": "qwen2_moe",
            "moe_intermediate_size": keys.integer("expert_feed_forward_length", inner),
            "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", shared),
            "norm_topk_prob": keys.flag("expert_weights_norm", False),
            "qkv_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        }
    )


def qwen3moe(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    keys = Keys(metadata, "qwen3moe")
    return (
        fields
        | keys.counts
        | {
            "model_type": "qwen3_moe",
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "norm_topk_prob": keys.flag("expert_weights_norm", True),
        }
    )


def olmoe(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    keys = Keys(metadata, "olmoe")
    return fields | keys.counts | {"norm_topk_prob": keys.flag("expert_weights_norm", False)}


def granitemoe(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    keys = Keys(metadata, "granitemoe")
    found = granite(fields, metadata, tensors) | keys.counts
    shared = keys.integer("expert_shared_feed_forward_length", 0)
    if shared == 0:
        return found
    split = {"shared_intermediate_size": shared, "shared_split": True}
    return found | split | {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}


def gpt_oss(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    keys = Keys(metadata, "gpt-oss")
    # A config.json without a scaling means the published one; a file without a scaling means none.
    scaling = fields.get("rope_scaling")
    stretched = (
        {"rope_scaling": scaling | {"truncate": False}} if scaling else {"rope_parameters": {"rope_type": "default"}}
    )
    return (
        fields
        | stretched
        | keys.counts
        | {
            "model_type": "gpt_oss",
            "intermediate_size": keys.integer("expert_feed_forward_length", fields["intermediate_size"]),
            "sliding_window": keys.integer("attention.sliding_window"),
        }
    )


def hunyuan_moe(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    keys = Keys(metadata, "hunyuan-moe")
    return fields | keys.counts | {"model_type": "hunyuan_v1_moe"}


def ernie_moe(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    keys = Keys(metadata, "ernie4_5-moe")
    return (
        fields
        | keys.counts
        | {
            "model_type": "ernie4_5_moe",
            "use_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "moe_num_shared_experts": keys.integer("expert_shared_count", 0),
            "moe_layer_start_index": keys.integer("leading_dense_block_count", 0),
            "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
        }
    )


def glm4moe(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    keys = Keys(metadata, "glm4moe")
    if keys.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise NotImplementedError(f"{metadata.path}: glm4moe.expert_gating_func other than sigmoid is not implemented")
    return (
        {"partial_rotary_factor": 1.0, **fields}
        | keys.counts
        | {
            "model_type": "glm4_moe",
            "use_qk_norm": "model.layers.0.self_attn.q_norm.weight" in tensors,
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "n_shared_experts": keys.integer("expert_shared_count", 1),
            "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
            "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
            "norm_topk_prob": keys.flag("expert_weights_norm", True),
            "n_group": keys.integer("expert_group_count", 1),
            "topk_group": keys.integer("expert_group_used_count", 1),
        }
    )


def phimoe(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    """A file has a single scale of the rotation, for both short and long sequences."""
    found = fields | Keys(metadata, "phimoe").counts | {"lm_head_bias": "lm_head.bias" in tensors}
    if scaling := fields.get("rope_scaling"):
        scale = scaling["attention_factor"]
        kept = {name: value for name, value in scaling.items() if name != "attention_factor"}
        found["rope_scaling"] = kept | {"short_mscale": scale, "long_mscale": scale}
    return found


def llama4(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    """A window of 0 means that all layers rotate and see all positions. Files do not state the chunk length, how
    queries grow, or if heads are normalised. These follow the published models: only Maverick's heads are not
    normalised."""
    keys = Keys(metadata, "llama4")
    layers, rotates_all = fields["num_hidden_layers"], metadata.integer("llama4.attention.sliding_window") == 0
    everywhere = {"no_rope_layers": [1] * layers, "layer_types": ["full_attention"] * layers}
    counts = keys.counts
    return (
        fields
        | counts
        | (everywhere if rotates_all else {})
        | {
            "intermediate_size": keys.integer("expert_feed_forward_length"),
            "intermediate_size_mlp": fields["intermediate_size"],
            "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
            "use_qk_norm": counts["num_experts"] != EXPERTS_OF_MAVERICK,
        }
    )


MIXTURES = {
    "llama": mixtral,
    "qwen2moe": qwen2moe,
    "qwen3moe": qwen3moe,
    "olmoe": olmoe,
    "granitemoe": granitemoe,
    "gpt-oss": gpt_oss,
    "hunyuan-moe": hunyuan_moe,
    "ernie4_5-moe": ernie_moe,
    "glm4moe": glm4moe,
    "phimoe": phimoe,
    "llama4": llama4,
}
"""Architecture -> function that changes its fields, as `FAMILIES` in families.py."""
MIXTURE_KEYS = {
    "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count",
    "expert_weights_norm", "expert_weights_scale", "expert_gating_func", "expert_group_count", "expert_group_used_count",
    "leading_dense_block_count", "interleave_moe_layer_step", "nextn_predict_layers",
}  # fmt: skip
"""Keys read in this module; config.py reads the last one."""
