"""Tensors and keys of latent attention, in the form that llama.cpp's converter writes."""

from __future__ import annotations

import re
from typing import Any

import gguf
from torch import Tensor

ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v32": "deepseek32",
    "glm4_moe_lite": "deepseek2",
    "glm_moe_dsa": "glm-dsa",
    "minicpm3": "minicpm3",
    "mistral4": "mistral4",
}
"""GGUF's architecture names by model_type."""
MIXTURES = tuple(name for name, architecture in ARCHITECTURES.items() if architecture != "minicpm3")


def arranged(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Splits kv_b into the part for keys, transposed, and the part for values. MiniCPM3's kv_b is left whole."""
    if config["model_type"] == "minicpm3":
        return state
    found: dict[str, Tensor] = {}
    indexer = {"wq_b": "attn_q_b", "wk": "attn_k", "k_norm": "k_norm", "weights_proj": "proj"}
    lengths = [config["qk_nope_head_dim"], config["v_head_dim"]]
    for name, tensor in state.items():
        if inside := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.indexer\.(\w+)\.(\w+)", name):
            found[f"blk.{inside[1]}.indexer.{indexer[inside[2]]}.{inside[3]}"] = tensor
            continue
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        keys, values = tensor.unflatten(0, (config["num_attention_heads"], -1)).split(lengths, dim=1)
        found[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2).contiguous()
        found[name.replace("kv_b_proj", "v_b_proj")] = values.contiguous()
    return found


def add_keys(writer: gguf.GGUFWriter, config: dict[str, Any], split: bool = True) -> None:
    """Adds the keys. `split` selects the newer form of files, in which kv_b is split."""
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key_length, value_length = config["qk_nope_head_dim"] + rope_dim, config["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rope_dim)
    if config["model_type"] == "minicpm3":
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(key_length)
        return
    writer.add_head_count_kv(1 if split else config["num_attention_heads"])
    writer.add_key_length(rank + rope_dim if split else key_length)
    writer.add_value_length(rank if split else value_length)
    if split:
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(value_length)
    if "index_topk" in config:
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
    kinds = config.get("mlp_layer_types")
    if kinds:
        writer.add_leading_dense_block_count(kinds.index("sparse"))
    is_sigmoid = config["model_type"] not in ("deepseek_v2", "mistral4")
    types = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(types.SIGMOID if is_sigmoid else types.SOFTMAX)
    if mscale := (config.get("rope_parameters") or {}).get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)
    if scale := (config.get("rope_parameters") or {}).get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(scale)
