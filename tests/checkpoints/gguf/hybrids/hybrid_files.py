"""Files of models whose layers keep a state, as llama.cpp's converter writes them. The one of llama-cpp-python 0.3.36
wrote the same tensors and keys for a checkpoint of each family, up to the last bit of rates. This was checked by
hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.comparison.gguf_families import permute
from tests.checkpoints.gguf.files import add_stored, finish, tensor_names
from tests.checkpoints.gguf.hybrids import kimi_files

ARCHITECTURES = {
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe", "granitemoehybrid": "granitehybrid", "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1", "mamba2": "mamba2", "nemotron_h": "nemotron_h",
    **kimi_files.ARCHITECTURES,
}  # fmt: skip
"""GGUF's architecture names by model_type."""
KINDS_WITH_STATE = ("conv", "linear_attention")
PERMUTED = ("granitehybrid", "nemotron_h", "nemotron_h_moe")
STACKED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
FLOATS = (
    *("ssm_conv1d.weight", "ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight", "ssm_a", "ssm_d"),
    *("shortconv.conv.weight", "_norm.weight", "ffn_gate_inp.weight"),
)
"""Ends of names of matrices that are never quantised."""


def write_hybrid(
    folder: Path,
    path: Path,
    types: str = "F32",
    as_floats: bool = False,
    add: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> None:
    """Writes the checkpoint in `folder` (config.json and one model.safetensors) to `path`. `types` is ggml's name of
    the matrices' type. With `as_floats`, the file holds their values in float32. `add` may add more to the file."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    kinds = kinds_of_layers(config)
    if architecture == "nemotron_h" and "moe" in kinds:
        architecture = "nemotron_h_moe"
    writer = gguf.GGUFWriter(path, architecture)
    state = load_file(folder / "model.safetensors")
    if is_kimi := config["model_type"] in kimi_files.ARCHITECTURES:
        kimi_files.add_keys(writer, config, kinds)
        tensors = kimi_files.arranged(state, config, kinds).items()
    else:
        add_keys(writer, config, kinds)
        tensors = arranged(state, config, architecture)
    add(writer)
    names = tensor_names(
        "kimi-linear" if is_kimi else architecture, len(kinds) + config.get("mtp_num_hidden_layers", 0)
    )
    for name, tensor in tensors:
        known = name if name.startswith("blk.") else names(name)
        is_float = tensor.ndim < 2 or known.endswith(FLOATS)
        add_stored(writer, known, tensor, "F32" if is_float else types, as_floats)
    finish(writer)


def kinds_of_layers(config: dict[str, Any]) -> list[str]:
    """The kind of each layer, in the words of transformers 5."""
    layers = config.get("num_hidden_layers")
    if config["model_type"] == "bamba":
        indices = config["attn_layer_indices"] or []
        return ["full_attention" if layer in indices else "linear_attention" for layer in range(layers)]
    kinds = config.get("layer_types") or config.get("layers_block_type")
    default = "linear_attention" if config["model_type"] in ("mamba2", "granitemoehybrid") else "full_attention"
    return kinds or [default] * layers


# -- tensors -----------------------------------------------------------------------------------------------------------


def arranged(state: dict[str, Tensor], config: dict[str, Any], architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file, by the Hub's names or GGUF's."""
    state = {of_mtp(name, config): tensor for name, tensor in state.items()}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            layer = re.search(r"layers\.(\d+)\.", name)[1]
            part = STACKED.get(expert[3], expert[3]).removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[int(expert[2])] = tensor
            continue
        tensor = tensor.float()
        if architecture.startswith(("qwen", "falcon")):
            tensor = (of_falcon if architecture == "falcon-h1" else of_qwen)(name, tensor, config)
        for new_name, piece in pieces(name, tensor, config, architecture):
            yield new_name, in_form(new_name, piece, config, architecture)
    for name, stack in experts.items():
        yield name, torch.stack([stack[index] for index in sorted(stack)])


def pieces(name: str, tensor: Tensor, config: dict[str, Any], architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file that a tensor of the Hub becomes, with names of the converter."""
    layer = re.search(r"layers\.(\d+)\.", name)
    block = f"blk.{layer[1]}" if layer else ""
    shared = "shexp" if config.get("num_local_experts") else None
    if name.endswith("block_sparse_moe.input_linear.weight"):
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2)):
            yield f"{block}.ffn_{part}_exps.weight", half
    elif name.endswith("shared_mlp.input_linear.weight"):
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2)):
            yield f"{block}.ffn_{part}{f'_{shared}' if shared else ''}.weight", half
    elif name.endswith("shared_mlp.output_linear.weight") and not shared:
        yield f"{block}.ffn_down.weight", tensor
    elif name.endswith("in_proj_qkvz.weight"):
        qkv, z = without_heads(tensor, config)
        yield f"{block}.attn_qkv.weight", qkv
        yield f"{block}.attn_gate.weight", z
    elif name.endswith(".pre_ff_layernorm.weight") and architecture == "falcon-h1":
        yield f"{block}.ffn_norm", tensor
    else:
        name = re.sub(r"\.dt_bias$", ".dt_proj.bias", name)
        name = re.sub(r"\.(expert_bias|e_score_correction_bias)$", r".\1.bias", name)
        name = name.replace("e_score_correction_bias.bias", "e_score_correction.bias")
        yield name, tensor


def of_mtp(name: str, config: dict[str, Any]) -> str:
    """Name of a tensor of the layer for multi-token prediction: as in a further layer, or as in a file."""
    own = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head_norm",
    }
    last = config.get("num_hidden_layers")
    if part := re.fullmatch(r"mtp\.(\w+)\.weight", name):
        return f"blk.{last}.nextn.{own[part[1]]}.weight"
    return re.sub(r"^mtp\.layers\.0\.", f"model.layers.{last}.", name)


def in_form(name: str, tensor: Tensor, config: dict[str, Any], architecture: str) -> Tensor:
    """The values and the shape that a file has."""
    mamba = architecture not in ("lfm2", "lfm2moe") and not architecture.startswith("qwen")
    heads = re.search(r"\.([qk])_proj\.", name)
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor.double()).float()  # the converter's exponential may differ in the last bit
    if mamba and name.endswith((".A_log", ".D")):
        return tensor.unsqueeze(1)
    if mamba and re.search(r"\.(mamba|mixer)\.norm\.weight$", name):
        return tensor.view(config.get("n_groups") or config["mamba_n_groups"], -1)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return tensor.squeeze(1)
    if architecture.startswith("qwen") and name.endswith("norm.weight") and "linear_attn" not in name:
        return tensor + 1
    if heads and architecture in PERMUTED:
        return permute(tensor, config["num_attention_heads" if heads[1] == "q" else "num_key_value_heads"])
    return tensor


def without_heads(tensor: Tensor, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Rows of all queries, keys and values, and those of all gates, which Qwen3-Next stores key head by key head."""
    heads, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"] // heads
    q, k, v, z = (
        part.flatten(0, 1) for part in tensor.unflatten(0, (heads, -1)).split([keys, keys, values, values], 1)
    )
    return torch.cat([q, k, v]), z


def of_qwen(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Orders the value heads of Qwen3.5 by their place in a group, then by group."""
    if config["model_type"] == "qwen3_next" or "linear_attn." not in name:
        return tensor
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * groups * config["linear_key_head_dim"]

    def tiled(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (groups, heads // groups, -1)).transpose(0, 1).flatten(0, 2)

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return torch.cat([tensor[:keys], tiled(tensor[keys:])])
    if name.endswith("out_proj.weight"):
        return tiled(tensor.t()).t()
    return tensor if name.endswith(".norm.weight") else tiled(tensor)


def of_falcon(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Multiplies the weights of Falcon-H1 by the factors of its config."""
    into, key = config["attention_in_multiplier"], config["key_multiplier"]
    inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    tensor = tensor * key if name.endswith("k_proj.weight") else tensor
    tensor = tensor * factors.get(name.removesuffix(".weight").rpartition(".")[2], 1.0)
    if name.endswith("in_proj.weight"):
        counts = torch.tensor([inner, inner, keys, keys, config["mamba_n_heads"]])
        tensor = tensor * torch.tensor(config["ssm_multipliers"]).repeat_interleave(counts)[:, None]
    return tensor


# -- keys --------------------------------------------------------------------------------------------------------------


def add_keys(writer: gguf.GGUFWriter, config: dict[str, Any], kinds: list[str]) -> None:
    """Adds the keys of a config.json."""
    family = config["model_type"]
    further = config.get("mtp_num_hidden_layers", 0)
    writer.add_block_count(len(kinds) + further)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_vocab_size(config["vocab_size"])
    if family == "mamba2":
        writer.add_context_length(2**20)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    else:
        add_attention(writer, config, kinds)
    if family == "nemotron_h":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
        writer.add_layer_norm_rms_eps(next(config[name] for name in names if name in config))
    if family.startswith("lfm2"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    elif family.startswith("qwen"):
        add_delta_rule(writer, config, kinds, further)
    else:
        add_mamba(writer, config)
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if experts and (family != "nemotron_h" or "moe" in kinds):
        add_experts(writer, config, experts)
    if family == "granitemoehybrid":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def add_attention(writer: gguf.GGUFWriter, config: dict[str, Any], kinds: list[str]) -> None:
    family, heads = config["model_type"], config["num_attention_heads"]
    groups, rope = config["num_key_value_heads"], config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(heads)
    by_layer = family.startswith("lfm2") or family in ("granitemoehybrid", "bamba", "nemotron_h")
    writer.add_head_count_kv([groups if kind == "full_attention" else 0 for kind in kinds] if by_layer else groups)
    if family == "nemotron_h":
        width = {"mlp": config["intermediate_size"], "moe": config.get("moe_intermediate_size")}
        writer.add_feed_forward_length([width.get(kind, 0) for kind in kinds])
    elif family == "lfm2":
        writer.add_feed_forward_length(adjusted_width(config))
    elif "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if family in ("granitemoehybrid", "bamba", "nemotron_h"):
        # Published files of Granite rotate only if no layer has a state. Those of Bamba name the rotated elements.
        writer.add_rope_scaling_finetuned(family == "bamba" or config.get("position_embedding_type") == "rope")
        share = rope.get("partial_rotary_factor", 0.5) if family == "bamba" else 1
        writer.add_rope_dimension_count(int(config["hidden_size"] // heads * share))
    if "mrope_section" in rope or family.startswith("qwen3_5"):
        writer.add_rope_dimension_sections([*rope.get("mrope_section", (11, 11, 10)), 0])


def adjusted_width(config: dict[str, Any]) -> int:
    """The width of LFM2's feed-forwards, which its config states only for another model."""
    width, multiple = config["intermediate_size"], config["block_multiple_of"]
    if not config["block_auto_adjust_ff_dim"]:
        return width
    return -(-int(config["block_ffn_dim_multiplier"] * int(2 * width / 3)) // multiple) * multiple


def add_delta_rule(writer: gguf.GGUFWriter, config: dict[str, Any], kinds: list[str], further: int) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_array(
        f"{writer.arch}.attention.recurrent_layers", [kind in KINDS_WITH_STATE for kind in kinds] + [False] * further
    )
    writer.add_full_attention_interval(4)
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 0.25)
    writer.add_rope_dimension_count(int(config["head_dim"] * share))
    if further:
        writer.add_nextn_predict_layers(further)


def add_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    def value(*names: str) -> int:
        return next(config[name] for name in names if config.get(name) is not None)

    heads = value("mamba_n_heads", "mamba_num_heads", "num_heads")
    inner = config.get("mamba_d_ssm")
    if config["model_type"] == "nemotron_h":
        inner = heads * config["mamba_head_dim"]
    writer.add_ssm_conv_kernel(value("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(value("mamba_d_state", "ssm_state_size", "state_size"))
    writer.add_ssm_group_count(value("mamba_n_groups", "n_groups"))
    writer.add_ssm_inner_size(inner or value("mamba_expand", "expand") * config["hidden_size"])
    writer.add_ssm_time_step_rank(heads)


def add_experts(writer: gguf.GGUFWriter, config: dict[str, Any], experts: int) -> None:
    family = config["model_type"]
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family.startswith("qwen"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if family == "nemotron_h":
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        if config["moe_latent_size"]:
            writer.add_uint32(f"{writer.arch}.moe_latent_size", config["moe_latent_size"])
