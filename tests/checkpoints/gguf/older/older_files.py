"""Files of BLOOM, Falcon, MPT, OLMo 1, StarCoder and Apertus, as llama.cpp's converter writes them. The one of
llama-cpp-python 0.3.36 wrote the same tensors and keys for a checkpoint of each family. This was checked by hand."""

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
from tests.checkpoints.gguf.files import add_stored, finish, tensor_names

ARCHITECTURES = {
    "apertus": "apertus", "bloom": "bloom", "falcon": "falcon", "gpt_bigcode": "starcoder", "mpt": "mpt",
    "olmo": "olmo",
}  # fmt: skip
"""GGUF's architecture names by model_type."""
XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def write_older(
    folder: Path,
    path: Path,
    types: str | Callable[[str], str] = "F32",
    as_floats: bool = False,
    add: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> None:
    """Writes the checkpoint in `folder` (config.json and one model.safetensors) to `path`. `types` is ggml's name of
    the matrices' type, for all or by the Hub's name. With `as_floats`, the file holds their values in float32. `add`
    may add more to the file."""
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    layers = add_keys(writer, config, state)
    add(writer)
    names = tensor_names(architecture, layers)
    for name, tensor in state.items():
        if ".act_fn." in name:
            continue  # numbers of xIELU are keys
        is_float = tensor.ndim < 2 or "wpe" in name
        short = name.removeprefix("transformer.") if architecture == "bloom" else name
        kind = "F32" if is_float else types if isinstance(types, str) else types(name)
        add_stored(writer, names(short), arranged(name, tensor, config), kind, as_floats)
    for name, factors in extra_tensors(config):
        writer.add_tensor(name, factors)
    finish(writer)


def arranged(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Arranges the rows of a tensor like the converter."""
    family = config["model_type"]
    if "query_key_value" in name:
        heads = config.get("num_attention_heads") or config["n_head"]
        groups = heads if family == "bloom" else key_heads(config)
        rows = tensor.unflatten(0, (groups, heads // groups + 2, -1))
        parts = rows[:, :-2], rows[:, -2:-1], rows[:, -1:]
        return torch.cat([part.flatten(0, 2) for part in parts])
    part = re.search(r"\.([qk])_proj\.weight", name)
    if part and family == "olmo":
        return permute(tensor, config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"])
    return tensor


def key_heads(config: dict[str, Any]) -> int:
    """Key heads of a Falcon."""
    if config["new_decoder_architecture"]:
        return config["num_kv_heads"]
    return 1 if config["multi_query"] else config["num_attention_heads"]


def add_keys(writer: gguf.GGUFWriter, config: dict[str, Any], state: dict[str, Tensor]) -> int:
    """Adds the keys of a config.json, and returns the number of layers."""
    family = config["model_type"]
    names = {
        "bloom": ("hidden_size", "n_layer", "n_head", "hidden_size"),
        "falcon": ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        "gpt_bigcode": ("n_embd", "n_layer", "n_head", "n_positions"),
        "mpt": ("d_model", "n_layers", "n_heads", "max_seq_len"),
    }.get(family, ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"))
    hidden, layers, heads, length = (config[name] for name in names)
    writer.add_context_length(2048 if family == "falcon" else length)  # not that of the config
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_feed_forward_length(config.get("intermediate_size", 4 * hidden))  # not that of other configs
    if family == "falcon":
        writer.add_tensor_data_layout("jploski")
        writer.add_head_count_kv(key_heads(config))
    elif family == "bloom":
        writer.add_head_count_kv(heads)
    elif family == "gpt_bigcode":
        writer.add_head_count_kv(1)
    elif family == "mpt":
        writer.add_max_alibi_bias(config["attn_config"].get("alibi_bias_max", 8))
    else:
        add_rotary(writer, config, heads)
    clip = config.get("clip_qkv") or (config.get("attn_config") or {}).get("clip_qkv")
    if clip is not None:
        writer.add_clamp_kqv(clip)
    if family == "apertus":
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        for name in XIELU:
            values = [float(state[f"model.layers.{layer}.mlp.act_fn.{name}"].float()) for layer in range(layers)]
            getattr(writer, f"add_xielu_{name}")(values)
    else:
        writer.add_layer_norm_eps(1e-5 if family in ("mpt", "olmo") else config["layer_norm_epsilon"])
    return layers


def add_rotary(writer: gguf.GGUFWriter, config: dict[str, Any], heads: int) -> None:
    """Adds the keys of the converter's base class for models like Llama."""
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config["model_type"] == "apertus":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def extra_tensors(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "apertus" and rope.get("rope_type") == "llama3":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        fields = {**config, "head_dim": head_dim, "rope_theta": rope["rope_theta"], "rope_scaling": rope}
        yield "rope_freqs.weight", rope_factors(fields)
