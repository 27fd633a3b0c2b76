"""Tensors and keys of mixtures of experts, in the form that llama.cpp's converter writes. For those with biased
sigmoids and windows, its own files gave the same logits, bit for bit. This was checked by hand."""

from __future__ import annotations

import re
from typing import Any

import gguf
import torch
from torch import Tensor

ARCHITECTURES = {
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe", "gpt_oss": "gpt-oss", "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe", "glm4_moe": "glm4moe", "phimoe": "phimoe", "llama4_text": "llama4",
    "afmoe": "afmoe", "bailing_moe_v2": "bailingmoe2", "cohere2_moe": "cohere2moe", "dbrx": "dbrx", "dots1": "dots1",
    "exaone_moe": "exaone-moe", "laguna": "laguna", "mellum": "mellum", "minimax_m2": "minimax-m2",
    "hy_v3": "hy_v3", "sarvam_moe": "bailingmoe2", "solar_open": "glm4moe",
}  # fmt: skip
"""GGUF's architecture names by model_type."""
PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
NAMES = {
    r"mlp\.gate\.weight": "ffn_gate_inp.weight",
    r"mlp\.gate\.wg\.weight": "ffn_gate_inp.weight",
    r"block_sparse_moe\.gate\.weight": "ffn_gate_inp.weight",
    r"block_sparse_moe\.router\.layer\.weight": "ffn_gate_inp.weight",
    r"block_sparse_moe\.output_linear\.weight": "ffn_down_exps.weight",
    r"shared_mlp\.output_linear\.weight": "ffn_down_shexp.weight",
    r"feed_forward\.router\.weight": "ffn_gate_inp.weight",
    r"feed_forward\.shared_expert\.(gate|up|down)_proj\.weight": r"ffn_\1_shexp.weight",
    r"mlp\.router\.(weight|bias)": r"ffn_gate_inp.\1",
    r"mlp\.experts\.down_proj_bias": "ffn_down_exps.bias",
    r"mlp\.(?:shared_experts?|shared_mlp)\.(gate|up|down)_proj\.weight": r"ffn_\1_shexp.weight",
    r"mlp\.shared_expert_gate\.weight": "ffn_gate_inp_shexp.weight",
    r"mlp\.(?:gate|moe_statics)\.e_score_correction_bias": "exp_probs_b.bias",
    r"self_attn\.sinks": "attn_sinks.weight",
    r"self_attn\.(?:gate_proj|g_proj)\.weight": "attn_gate.weight",
    r"mlp\.router\.gate\.weight": "ffn_gate_inp.weight",
    r"(?:mlp|mlp\.experts|block_sparse_moe)\.e_score_correction_bias": "exp_probs_b.bias",
    r"mlp\.(?:gate\.)?expert_bias": "exp_probs_b.bias",
    r"attention\.query_key_value\.(weight|bias)": r"attn_qkv.\1",
    r"attention\.dense\.(weight|bias)": r"attn_output.\1",
    r"attention\.(query|key)_layernorm\.weight": lambda found: f"attn_{found[1][0]}_norm.weight",
    r"pre_mlp_layernorm\.weight": "ffn_norm.weight",
    r"post_mlp_layernorm\.weight": "post_ffw_norm.weight",
}
"""Pattern of a tensor's name in a layer -> GGUF's name."""


def flat_dbrx(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a DBRX with the usual names of fields."""
    attention, experts = config["attn_config"], config["ffn_config"]
    return config | {
        "hidden_size": config["d_model"],
        "intermediate_size": experts["ffn_hidden_size"],
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": config["max_seq_len"],
        "num_attention_heads": config["n_heads"],
        "num_experts": experts["moe_num_experts"],
        "num_experts_per_tok": experts["moe_top_k"],
        "num_hidden_layers": config["n_layers"],
        "num_key_value_heads": attention["kv_n_heads"],
        "clip_qkv": attention["clip_qkv"],
    }


def of_dbrx(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Stacks the experts of a DBRX, `[E, N, K]`."""
    found, shape = {}, (config["num_experts"], config["intermediate_size"], config["hidden_size"])
    for name, tensor in state.items():
        if expert := re.fullmatch(r"transformer\.blocks\.(\d+)\.ffn\.experts\.mlp\.(w1|v1|w2)", name):
            stack = tensor.view(shape)
            part = {"w1": "gate", "v1": "up", "w2": "down"}[expert[2]]
            name, tensor = f"blk.{expert[1]}.ffn_{part}_exps.weight", stack if part != "down" else stack.transpose(1, 2)
        found[name] = tensor
    return found


def arranged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, with GGUF's names for experts, routers and the tensors next to them."""
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        inside = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if not inside:
            found[name] = tensor
            continue
        layer, part = inside.groups()
        if expert := re.fullmatch(r".*\.experts\.(\d+)\.(\w+)\.weight", part):
            found.setdefault(f"blk.{layer}.ffn_{PARTS[expert[2]]}_exps.weight", {})[int(expert[1])] = tensor
        elif part.endswith(("input_linear.weight", "experts.gate_up_proj", "experts.gate_up_proj_bias")):
            found |= {f"blk.{layer}.{half}": half_of for half, half_of in halves(part, tensor).items()}
        elif part in ("mlp.experts.down_proj", "feed_forward.experts.down_proj"):
            found[f"blk.{layer}.ffn_down_exps.weight"] = tensor.transpose(1, 2)
        else:
            known = [re.sub(pattern, there, part) for pattern, there in NAMES.items() if re.fullmatch(pattern, part)]
            one_row = part.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction_bias"))
            found[f"blk.{layer}.{known[0]}" if known else name] = tensor[0] if one_row else tensor
    return {
        name: torch.stack([tensor[expert] for expert in sorted(tensor)]) if isinstance(tensor, dict) else tensor
        for name, tensor in found.items()
    }


def halves(part: str, tensor: Tensor) -> dict[str, Tensor]:
    """Splits gate and up, which are one tensor on the Hub."""
    if "input_linear" in part:
        kind = "shexp" if "shared" in part else "exps"
        gate, up = tensor.chunk(2, dim=-2)
        return {f"ffn_gate_{kind}.weight": gate, f"ffn_up_{kind}.weight": up}
    if part.endswith("bias"):
        return {"ffn_gate_exps.bias": tensor[:, ::2], "ffn_up_exps.bias": tensor[:, 1::2]}
    rows = tensor.transpose(1, 2)
    if part.startswith("feed_forward"):
        gate, up = rows.chunk(2, dim=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    return {"ffn_gate_exps.weight": rows[:, ::2], "ffn_up_exps.weight": rows[:, 1::2]}


def add_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    used = config.get("num_experts_per_tok") or config.get("moe_k") or config["moe_topk"]
    writer.add_expert_count(next(config[name] for name in counts if name in config))
    writer.add_expert_used_count(used if isinstance(used, int) else used[0])
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    if config["model_type"] not in ("mixtral", "granitemoe", "granitemoeshared", "olmoe", "phimoe", "dbrx"):
        writer.add_expert_feed_forward_length(inner)
    if shared := config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if config["model_type"] == "hy_v3":
        writer.add_expert_shared_feed_forward_length(inner * config["num_shared_experts"])
    for field, add in {
        "moe_num_shared_experts": writer.add_expert_shared_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "moe_layer_interval": writer.add_interleave_moe_layer_step,
        "interleave_moe_layer_step": writer.add_interleave_moe_layer_step,
        "moe_layer_start_index": writer.add_leading_dense_block_count,
        "num_shared_experts": writer.add_expert_shared_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "num_dense_layers": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "moe_routed_scaling_factor": writer.add_expert_weights_scale,
        "route_scale": writer.add_expert_weights_scale,
        "router_scaling_factor": writer.add_expert_weights_scale,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
    }.items():
        if config.get(field) is not None:
            add(config[field])
    if "norm_topk_prob" in config:
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["model_type"] in SIGMOIDS or config.get("expert_selection_fn") == "sigmoid":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif config["model_type"] == "cohere2_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if config["model_type"] in WINDOWED:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    kinds = config.get("mlp_layer_types") or []
    if "dense" in kinds and config["model_type"] != "exaone_moe":
        writer.add_leading_dense_block_count(kinds.index("sparse"))


SIGMOIDS = (
    "afmoe",
    "bailing_moe_v2",
    "dots1",
    "exaone_moe",
    "glm4_moe",
    "hy_v3",
    "laguna",
    "minimax_m2",
    "sarvam_moe",
    "solar_open",
)
WINDOWED = ("cohere2_moe", "exaone_moe", "mellum")
"""Families whose files list the layers with a window."""
