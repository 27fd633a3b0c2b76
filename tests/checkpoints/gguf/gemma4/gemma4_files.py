"""Files of Gemma 4, as llama.cpp's converter writes them. The one of llama-cpp-python 0.3.36 wrote the same tensors and
keys; this was checked by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from tests.checkpoints.gguf.files import add_stored, finish, tensor_names

FLOATS = ("_norm.weight", "ffn_gate_inp.weight", "layer_output_scale.weight", ".scale")
"""Ends of names of tensors that are never quantised."""


def write_gemma4(
    folder: Path,
    path: Path,
    types: str | Callable[[str], str] = "F32",
    as_floats: bool = False,
    add: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    apart: bool = False,
) -> None:
    """Writes the checkpoint in `folder`, which may be an assistant, to `path`. `types` is ggml's name of the matrices'
    type, for all or by the file's name. With `as_floats`, the file holds their values in float32. With `apart`, gates
    and ups of experts are separate stacks. `add` may add more to the file."""
    config = json.loads((folder / "config.json").read_text())
    is_assistant = "backbone_hidden_size" in config
    writer = gguf.GGUFWriter(path, "gemma4-assistant" if is_assistant else "gemma4")
    if is_assistant:
        writer.add_uint32("gemma4-assistant.embedding_length_out", config["backbone_hidden_size"])
        config = config["text_config"]
        writer.add_uint32("gemma4-assistant.nextn_predict_layers", config["num_hidden_layers"])
    add_keys(writer, config)
    add(writer)
    names = tensor_names("gemma4", config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        known = name_in_file(name, names)
        pieces = {known: tensor}
        if apart and known.endswith("ffn_gate_up_exps.weight"):
            pieces = {known.replace("gate_up", part): half for part, half in zip(("gate", "up"), tensor.chunk(2, 1))}
        for known, piece in pieces.items():
            kind = types if isinstance(types, str) else types(known)
            is_float = piece.ndim < 2 or known.endswith(FLOATS)
            add_stored(writer, known, piece, "F32" if is_float else kind, as_floats)
    heads = head_dim_of_full(config) // 2
    rotated = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * heads)
    writer.add_tensor("rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (heads - rotated)).numpy())
    finish(writer)


def name_in_file(name: str, names: Callable[[str], str]) -> str:
    if name.endswith("_projection.weight") and not name.startswith("model."):
        return f"nextn.{name}"
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if name.endswith("router.per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    return names(name if name.endswith(".weight") else f"{name}.weight")


def full_layers(config: dict[str, Any]) -> dict[int, dict[str, int]]:
    """Overrides of the layers without a window, by layer."""
    given = {int(layer): fields for layer, fields in config["per_layer_config"].items()}
    return {layer: given[layer] for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"}


def head_dim_of_full(config: dict[str, Any]) -> int:
    return next(iter(full_layers(config).values()))["head_dim"]


def add_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    ropes, layers = config["rope_parameters"], range(config["num_hidden_layers"])
    full, sliding, shared = head_dim_of_full(config), config["head_dim"], config["num_kv_shared_layers"]
    writer.add_block_count(len(layers))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    inner = config["intermediate_size"]
    first = len(layers) - shared if config["use_double_wide_mlp"] else len(layers)
    wide = [inner if layer < first else 2 * inner for layer in layers]
    writer.add_feed_forward_length(wide if config["use_double_wide_mlp"] else inner)
    writer.add_head_count(config["num_attention_heads"])
    groups = full_layers(config)
    of_full = next(iter(groups.values())).get("num_key_value_heads")
    usual = config["num_key_value_heads"]
    writer.add_head_count_kv(usual if of_full is None else [of_full if layer in groups else usual for layer in layers])
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", [layer not in groups for layer in layers])
    numbers = {
        "attention.key_length": full, "attention.value_length": full, "attention.key_length_swa": sliding,
        "attention.value_length_swa": sliding, "rope.dimension_count": full, "rope.dimension_count_swa": sliding,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"{writer.arch}.{key}", value)
