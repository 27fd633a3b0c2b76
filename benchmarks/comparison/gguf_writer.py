"""A Llama, Qwen2 or Qwen3 checkpoint as a GGUF file for llama.cpp, in bf16, fp16 or fp32.

llama.cpp rotates the pairs (2i, 2i + 1) of a Llama head where checkpoints on the Hub have them at (i, i + D/2): the
rows of queries and keys are permuted. It rotates Qwen as the Hub has it. Norms and biases are fp32, the tokenizer is
left out (`no_vocab`). Names and keys: the GGUF specification (ggml/docs/gguf.md) and llama.cpp's src/llama-arch.cpp.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
PERMUTED = {"llama"}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def write_gguf(checkpoint: Path, path: Path, dtype: str) -> None:
    """Writes `checkpoint` (a directory with one model.safetensors) to `path`, tensor by tensor. Raises
    NotImplementedError for another architecture or another scaling of the rotary embedding, ImportError without the
    `gguf` package."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    name = config["architectures"][0]
    if name not in ARCHITECTURES:
        raise NotImplementedError(f"the GGUF writer knows {', '.join(ARCHITECTURES)}; got {name}")
    architecture = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, architecture)
    _add_config(writer, config, architecture)
    kinds = {
        "bf16": gguf.GGMLQuantizationType.BF16,
        "fp16": gguf.GGMLQuantizationType.F16,
        "fp32": gguf.GGMLQuantizationType.F32,
    }
    writer.add_file_type(
        {
            "bf16": gguf.LlamaFileType.MOSTLY_BF16,
            "fp16": gguf.LlamaFileType.MOSTLY_F16,
            "fp32": gguf.LlamaFileType.ALL_F32,
        }[dtype]
    )
    factors = rope_factors(config)
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        matrices = {key: len(file.get_slice(key).get_shape()) == 2 for key in file.keys()}
        for key, is_matrix in matrices.items():
            shape, kind = file.get_slice(key).get_shape(), kinds[dtype if is_matrix else "fp32"]
            itemsize = DTYPES[dtype].itemsize if is_matrix else 4
            stored = np.dtype({gguf.GGMLQuantizationType.BF16: "float16"}.get(kind, f"float{8 * itemsize}"))
            writer.add_tensor_info(tensor_name(key), shape, stored, math.prod(shape) * itemsize, raw_dtype=kind)
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, is_matrix in matrices.items():
            tensor = file.get_tensor(key)
            heads = _heads(config, key) if architecture in PERMUTED else None
            if heads:
                tensor = permute(tensor, heads)
            tensor = tensor.to(DTYPES[dtype] if is_matrix else torch.float32).contiguous()
            writer.write_tensor_data(
                tensor.view(torch.uint8).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
            )
        if factors is not None:
            writer.write_tensor_data(factors)
    writer.close()


def tensor_name(name: str) -> str:
    """GGUF's name of a checkpoint's tensor."""
    if name in OUTER:
        return OUTER[name]
    _, _, index, rest = name.split(".", 3)
    part, _, end = rest.rpartition(".")
    return f"blk.{index}.{INNER[part]}.{end}"


def permute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows `[heads * D, ...]`: of each head, row i and row i + D/2 become rows 2i and 2i + 1."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def rope_factors(config: dict[str, Any]) -> np.ndarray | None:
    """`[D/2]`: by how much llama.cpp must divide each angle for Llama 3's scaling; None for no scaling.

    Source: transformers, `_compute_llama3_parameters`: wavelengths below `original / high` stay, those above
    `original / low` are stretched by `factor`, with a smooth passage between."""
    scaling = config.get("rope_scaling")
    if not scaling:
        return None
    if scaling["rope_type"] != "llama3":
        raise NotImplementedError(f"the GGUF writer knows the rope scaling llama3; got {scaling['rope_type']}")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    low, high, original = (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def _heads(config: dict[str, Any], name: str) -> int | None:
    if "self_attn.q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if "self_attn.k_proj." in name else None


def _add_config(writer: Any, config: dict[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name("random weights")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
