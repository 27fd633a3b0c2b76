"""Converts the metadata of each family to fields of a config.json that differ from a Llama's. This module has the
families with layer norms and GLM; others are in llama_like.py, mixtures.py and latent.py."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from pace.checkpoints.gguf.file import Metadata
from pace.checkpoints.gguf.latent import deepseek2, minicpm3
from pace.checkpoints.gguf.llama_like import LLAMA_LIKE
from pace.checkpoints.gguf.mixtures import MIXTURES

LAYER_NORMS = {
    "gpt2": "layer_norm_epsilon",
    "gptneox": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "stablelm": "layer_norm_eps",
    "command-r": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
}
"""Architectures with layer norms -> the config.json field of their epsilon."""
PARALLEL = "use_parallel_residual"

Fields = dict[str, Any]


def of_family(architecture: str, fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    """Returns `fields` changed for this architecture. `tensors`: names on the Hub. Raises ValueError or
    NotImplementedError that name the file."""
    change = FAMILIES.get(architecture)
    return change(fields, metadata, tensors) if change else fields


def _gpt2(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    unknown = ("num_key_value_heads", "head_dim", "rope_theta", "intermediate_size")
    kept = {name: value for name, value in fields.items() if name not in unknown}
    return kept | {"n_inner": fields["intermediate_size"], "matrices_transposed": False}


def _gpt_neox(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    kept = {name: value for name, value in fields.items() if name not in ("num_key_value_heads", "head_dim")}
    return {"partial_rotary_factor": 1.0, **kept} | {
        "attention_bias": "gpt_neox.layers.0.attention.query_key_value.bias" in tensors,
        "qkv_by_head": False,
        PARALLEL: metadata.flag(f"gptneox.{PARALLEL}", True),
    }


def _starcoder2(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    return fields | {"use_bias": "model.layers.0.self_attn.q_proj.bias" in tensors}


def _stablelm(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    # The key for parallel residuals is wrong if config.json has no such field. llama.cpp checks for the second norm,
    # too.
    normalises = "model.layers.0.self_attn.q_layernorm.weight" in tensors
    return {"partial_rotary_factor": 1.0, **fields} | {
        "use_qkv_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "qk_layernorm": normalises,
        "head_norms_stacked": normalises,
        PARALLEL: "model.layers.0.post_attention_layernorm.weight" not in tensors,
    }


def _glm(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    return {"partial_rotary_factor": 1.0, **fields}  # `fields` lacks the factor if the whole head is rotated


def _chatglm(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    rotated, theta = fields.pop("partial_rotary_factor", 1.0), fields.pop("rope_theta")
    if rotated != 0.5:
        raise NotImplementedError(
            f"{metadata.path}: chatglm.rope.dimension_count must be half of a head; it is {rotated} of it"
        )
    return fields | {
        "rope_ratio": theta / 10000,
        "multi_query_attention": True,
        "multi_query_group_num": fields.pop("num_key_value_heads"),
        "add_qkv_bias": "transformer.encoder.layers.0.self_attention.query_key_value.bias" in tensors,
        "add_bias_linear": "transformer.encoder.layers.0.self_attention.dense.bias" in tensors,
    }


def _qwen_vl(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    """Drops `use_mrope`, which splits frequencies among three positions. For text the three positions are equal."""
    return {name: value for name, value in fields.items() if name != "use_mrope"}


FAMILIES: dict[str, Callable[[Fields, Metadata, Collection[str]], Fields]] = {
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "chatglm": _chatglm,
    "glm": _glm,
    "glm4": _glm,
    "qwen2vl": _qwen_vl,
    "qwen3vl": _qwen_vl,
    **LLAMA_LIKE,
    **MIXTURES,
    "deepseek2": deepseek2,
    "minicpm3": minicpm3,
}
