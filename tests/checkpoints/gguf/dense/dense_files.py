"""Files of dense families that are close to others, as llama.cpp's converter writes them."""

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

from benchmarks.comparison.gguf_families import permute, rope_factors
from pace.llm.models.families.renamed import ExaoneForCausalLM
from tests.checkpoints.gguf import latent_files
from tests.checkpoints.gguf.files import add_stored, finish, tensor_names

ARCHITECTURES = {
    "arcee": "arcee", "bitnet": "bitnet", "exaone": "exaone", "exaone4": "exaone4", "gemma": "gemma",
    "granite_swa": "granite_swa", "granitemoe_swa": "granite_swa", "internlm3": "llama", "iquestcoder": "llama",
    "jais2": "jais2", "llama": "internlm2", "ministral3": "mistral3", "mistral": "mistral3", "nemotron": "nemotron",
    "seed_oss": "seed_oss", "youtu": "deepseek2",
}  # fmt: skip
"""GGUF's architecture names by model_type. Mistral is one of a checkpoint that takes images, and Llama an InternLM 2,
which has its tensors in files."""
PERMUTED = ("arcee", "granite_swa", "internlm2", "llama", "mistral3")
UNKNOWN = {
    r"self_attn\.attn_sub_norm\.weight": "attn_sub_norm",
    r"mlp\.ffn_sub_norm\.weight": "ffn_sub_norm",
    r"self_attn\.sinks": "attn_sinks",
    r"block_sparse_moe\.(?:experts\.gate_up_proj|input_linear\.weight)": "ffn_gate_up_exps",
    r"block_sparse_moe\.(?:experts\.down_proj|output_linear\.weight)": "ffn_down_exps",
    r"block_sparse_moe\.router\.(?:layer\.)?weight": "ffn_gate_inp",
    r"shared_mlp\.input_linear\.weight": "ffn_up_shexp",
    r"shared_mlp\.output_linear\.weight": "ffn_down_shexp",
}
"""Names that the gguf package of this version does not know, by pattern: norms of BitNet, Granite with windows."""
ADDS_ONE = ("gemma", "nemotron")
LAYER_NORMS = {"nemotron": "norm_eps", "jais2": "layer_norm_eps"}


def write_dense(
    folder: Path,
    path: Path,
    types: str = "F32",
    as_floats: bool = False,
    add: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> None:
    """Writes the checkpoint in `folder` (config.json and one model.safetensors) to `path`. `types` is ggml's name of
    the matrices' type. With `as_floats`, the file holds their values in float32. `add` may change the keys."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    add_keys(writer, config)
    add(writer)
    for name, tensor in arranged(load_file(folder / "model.safetensors"), config, architecture):
        add_stored(writer, name, tensor, types if tensor.ndim > 1 else "F32", as_floats)
    finish(writer)


def arranged(state: dict[str, Tensor], config: dict[str, Any], architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file."""
    # The gguf package of this version does not know Granite with windows, which has the names of Granite.
    names = tensor_names("granite" if architecture == "granite_swa" else architecture, config["num_hidden_layers"])
    if architecture == "exaone":
        state = {of_llama(name): tensor for name, tensor in state.items()}
    if architecture == "deepseek2":
        state = latent_files.arranged(state, config)
    for name, tensor in state.items():
        if heads := re.search(r"self_attn\.([qk])_proj", name):
            if architecture in PERMUTED:
                tensor = permute(tensor, config["num_attention_heads" if heads[1] == "q" else "num_key_value_heads"])
        if architecture in ADDS_ONE and name.endswith("norm.weight"):
            tensor = tensor + 1
        inside = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        part = inside and next((part for pattern, part in UNKNOWN.items() if re.fullmatch(pattern, inside[2])), None)
        yield f"blk.{inside[1]}.{part}.weight" if part else names(name), tensor
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        more = {"head_dim": head_dim(config), "rope_theta": rope["rope_theta"], "rope_scaling": rope}
        yield "rope_freqs.weight", torch.from_numpy(rope_factors(config | more))


def of_llama(name: str) -> str:
    for pattern, here in ExaoneForCausalLM.other_names.items():
        name = re.sub(pattern, here, name)
    return name


def head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def add_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Adds the keys of a config.json."""
    family, layers = config["model_type"], config["num_hidden_layers"]
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    if family == "youtu":
        latent_files.add_keys(writer, config | {"mlp_layer_types": None})
        writer.add_leading_dense_block_count(layers)
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(0)
        del writer.kv_data[0]["deepseek2.expert_gating_func"]
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        if config.get("head_dim"):
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
    if family in LAYER_NORMS:
        writer.add_layer_norm_eps(config[LAYER_NORMS[family]])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    add_rotation(writer, config)
    if family in ("exaone4", "granite_swa", "granitemoe_swa") and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if family == "granitemoe_swa":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if family in ("granite_swa", "granitemoe_swa"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def add_rotation(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    family, rope = config["model_type"], config.get("rope_parameters") or {}
    if "rope_theta" in rope and family != "gemma":
        writer.add_rope_freq_base(rope["rope_theta"])
    if family in ("exaone", "internlm3", "jais2", "nemotron"):
        writer.add_rope_dimension_count(int(head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    elif family == "nemotron":
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_float32("mistral3.attention.temperature_scale", rope["llama_4_scaling_beta"])
