"""Converts the metadata of families with latent attention to fields of a config.json, in addition to those that
config.py reads.

llama.cpp treats what is cached of a position as one wide key/value head. It calls all of DeepSeek's kind `deepseek2`:
V2, V3, GLM-4.7-Flash, Kimi K2."""

from __future__ import annotations

from typing import Any

from pace.checkpoints.gguf.file import Metadata
from pace.checkpoints.gguf.mixtures import SIGMOID, Keys, Shapes, has_experts

Fields = dict[str, Any]

LATENT = ("deepseek2", "minicpm3")
SOFTMAX = 1
"""Value of expert_gating_func."""
LATENT_KEYS = {
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "attention.value_length_mla",
}


def deepseek2(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    if not has_experts(metadata, "deepseek2"):
        raise NotImplementedError(f"{metadata.path}: deepseek2 without experts is not implemented")
    keys = Keys(metadata, "deepseek2")
    gating = keys.integer("expert_gating_func", SIGMOID if _is_glm(fields) else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise NotImplementedError(f"{metadata.path}: deepseek2.expert_gating_func = {gating} is not implemented")
    groups = {
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }
    kind = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    if gating == SOFTMAX:
        limited = groups["n_group"] > 1
        kind = {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if limited else "greedy"}
    # Files from before kv_b was split by heads have the head lengths under the keys of other families.
    key_length = keys.integer("attention.key_length_mla", metadata.integer("deepseek2.attention.key_length"))
    value_length = keys.integer("attention.value_length_mla", metadata.integer("deepseek2.attention.value_length"))
    return (
        _latent(fields, keys, key_length)
        | keys.counts
        | groups
        | kind
        | {
            "v_head_dim": value_length,
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "n_shared_experts": keys.integer("expert_shared_count"),
            "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
            "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
            "norm_topk_prob": keys.flag("expert_weights_norm", False),
            "num_nextn_predict_layers": 0,
        }
    )


def _is_glm(fields: Fields) -> bool:
    """True for GLM-4.7-Flash, whose first files do not state that its scores are sigmoids."""
    return fields["num_hidden_layers"] in (47, 48) and fields["vocab_size"] == 154880


def minicpm3(fields: Fields, metadata: Metadata, tensors: Shapes) -> Fields:
    """The factors of embeddings, branches and logits are those of the published model, the only one."""
    keys = Keys(metadata, "minicpm3")
    return _latent(fields, keys, keys.integer("attention.key_length"))


def _latent(fields: Fields, keys: Keys, key_length: int) -> Fields:
    """Fields of head and latent widths, and YaRN's mscale. A file stores a tenth of mscale."""
    name = keys.architecture
    rope_dim = fields["head_dim"]
    found = fields | {
        "num_key_value_heads": fields["num_attention_heads"],
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "q_lora_rank": keys.metadata.integer(f"{name}.attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_length - rope_dim,
    }
    scaling = fields.get("rope_scaling")
    if scaling and scaling["rope_type"] == "yarn":
        mscale = round(10 * keys.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
        found["rope_scaling"] = scaling | ({"mscale": mscale, "mscale_all_dim": mscale} if mscale else {})
    return found
