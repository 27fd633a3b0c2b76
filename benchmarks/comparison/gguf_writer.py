"""A Llama, Qwen2 or Qwen3 checkpoint as a GGUF file for llama.cpp, in bf16, fp16, fp32 or q8_0.

llama.cpp rotates the pairs (2i, 2i + 1) of a Llama head where checkpoints on the Hub have them at (i, i + D/2): the
rows of queries and keys are permuted. It rotates Qwen as the Hub has it. Norms and biases are fp32. Names and keys: the GGUF specification (ggml/docs/gguf.md) and llama.cpp's src/llama-arch.cpp.
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
Q8_0_BYTES, Q8_0_ELEMENTS = 34, 32


def write_gguf(checkpoint: Path, path: Path, dtype: str, tokenizer: Path | None = None) -> None:
    """Writes `checkpoint` (a directory with one model.safetensors) to `path`, tensor by tensor, with the byte-level
    `tokenizer` of a directory, or without one (`no_vocab`). `dtype`: one of DTYPES, or "q8_0". Raises
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
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_tokenizer(writer, tokenizer, config["vocab_size"])
    kinds = {
        "bf16": gguf.GGMLQuantizationType.BF16,
        "fp16": gguf.GGMLQuantizationType.F16,
        "fp32": gguf.GGMLQuantizationType.F32,
        "q8_0": gguf.GGMLQuantizationType.Q8_0,
    }
    writer.add_file_type(
        {
            "bf16": gguf.LlamaFileType.MOSTLY_BF16,
            "fp16": gguf.LlamaFileType.MOSTLY_F16,
            "fp32": gguf.LlamaFileType.ALL_F32,
            "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
        }[dtype]
    )
    factors = rope_factors(config)
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        matrices = {key: len(file.get_slice(key).get_shape()) == 2 for key in file.keys()}
        for key, is_matrix in matrices.items():
            shape, held = file.get_slice(key).get_shape(), dtype if is_matrix else "fp32"
            stored = np.dtype("float32" if held == "fp32" else "float16")  # of another kind it says nothing
            writer.add_tensor_info(
                tensor_name(key), shape, stored, _num_bytes(math.prod(shape), held), raw_dtype=kinds[held]
            )
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
            writer.write_tensor_data(_encode(tensor, dtype if is_matrix else "fp32"))
        if factors is not None:
            writer.write_tensor_data(factors)
    writer.close()


def _num_bytes(num_elements: int, dtype: str) -> int:
    if dtype == "q8_0":
        return num_elements // Q8_0_ELEMENTS * Q8_0_BYTES
    return num_elements * DTYPES[dtype].itemsize


def _encode(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    import gguf

    if dtype == "q8_0":
        return gguf.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    tensor = tensor.to(DTYPES[dtype]).contiguous()
    return tensor.view(torch.uint8).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


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


def _add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """The tokens and merges of a byte-level tokenizer.json. The ids after them are words that no text is cut into, and
    the last one is the end: models of random weights hardly ever pick it."""
    import gguf

    state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"\u0120w{index}" for index in range(vocab_size)]
    types = [gguf.TokenType.NORMAL] * vocab_size
    for token, index in state["model"]["vocab"].items():
        tokens[index] = token
    for added in state["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    types[-1] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_eos_token_id(vocab_size - 1)
    writer.add_add_bos_token(False)
