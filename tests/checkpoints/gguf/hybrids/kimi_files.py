"""Tensors and keys of Kimi-Linear and Ling 3, in the form that llama.cpp's converter writes. Its own files gave the
same logits, bit for bit, and those of llama.cpp agree. This was checked by hand."""

from __future__ import annotations

import re
from typing import Any

import gguf
import torch
from torch import Tensor

from tests.checkpoints.gguf import latent_files, mixture_files

ARCHITECTURES = {"kimi_linear": "kimi-linear", "bailing_hybrid": "bailingmoe3"}
"""GGUF's architecture names by model_type."""
HUB = {
    "block_sparse_moe.": "mlp.",
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
}
"""Names on the Hub, and the usual ones."""
NAMES = {
    r"([qkv])_conv1d\.weight": r"ssm_conv1d_\1.weight",
    r"([fg]_[ab])_proj\.weight": r"ssm_\1.weight",
    r"([fg])_proj\.weight": r"ssm_\1_a.weight",
    r"b_proj\.weight": "ssm_beta.weight",
    r"o_norm\.weight": "ssm_norm.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
}
"""Pattern of a name in attention -> GGUF's name, where a layer has a state."""


def arranged(state: dict[str, Tensor], config: dict[str, Any], kinds: list[str]) -> dict[str, Tensor]:
    """The tensors of a file, by the Hub's usual names or GGUF's."""
    usual = {}
    for name, tensor in state.items():
        for old, new in HUB.items():
            name = name.replace(old, new)
        usual[name] = tensor
    found = {}
    for name, tensor in latent_files.arranged(mixture_files.arranged(usual), config).items():
        if name.endswith("conv1d.weight"):
            tensor = tensor.view(1, len(tensor), 1, -1)
        if name.endswith("A_log"):
            rates = torch.exp(tensor.double()).float()
            tensor = rates.view(-1, 1) if config["model_type"] == "bailing_hybrid" else -rates
        found[gguf_name(name, kinds)] = tensor
    return found


def gguf_name(name: str, kinds: list[str]) -> str:
    inside = re.fullmatch(r"(?:model\.layers|blk)\.(\d+)\.(?:self_attn\.)?(.*)", name)
    if not inside:
        return name
    layer, part = int(inside[1]), inside[2]
    if kinds[layer] == "full_attention":
        return name.replace(f"model.layers.{layer}.self_attn.g_proj", f"blk.{layer}.attn_gate")
    known = [re.sub(pattern, there, part) for pattern, there in NAMES.items() if re.fullmatch(pattern, part)]
    return f"blk.{layer}.{known[0]}" if known else name


def add_keys(writer: gguf.GGUFWriter, config: dict[str, Any], kinds: list[str]) -> None:
    """Adds the keys of a config.json."""
    rope_dim, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.add_block_count(len(kinds))
    writer.add_context_length(config["model_max_length"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([int(kind == "full_attention") for kind in kinds])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_uint32(f"{writer.arch}.kda.head_dim", config["linear_head_dim"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rope_dim)
    writer.add_key_length(rank + rope_dim)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["num_expert_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if config["model_type"] == "bailing_hybrid":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        writer.add_expert_weights_norm(config["moe_renormalize"])
        writer.add_bool("bailingmoe3.kda.safe_gate", config["kda_safe_gate"])
        writer.add_float32("bailingmoe3.kda.gate_lower_bound", config["kda_lower_bound"])
