"""Writes a checkpoint as a GGUF file for llama.cpp in bf16, fp16, fp32 or q8_0, tensor by tensor. Its contents are
defined in `gguf_families`. Norms, biases and routers are fp32."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from benchmarks.comparison import gguf_families

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "q8_0": "Q8_0"}
"""ggml's names of tensor types."""
FILE_TYPES = {"bf16": "MOSTLY_BF16", "fp16": "MOSTLY_F16", "fp32": "ALL_F32", "q8_0": "MOSTLY_Q8_0"}
Q8_0_BYTES, Q8_0_ELEMENTS = 34, 32


def write_gguf(checkpoint: Path, path: Path, dtype: str, tokenizer: Path | None = None) -> None:
    """Writes `checkpoint` (a directory with one model.safetensors) to `path`, tensor by tensor. `tokenizer`: directory
    of a byte-level tokenizer; None for a file without one (`no_vocab`). `dtype`: one of DTYPES, or "q8_0".

    Raises NotImplementedError for an unsupported architecture or scaling of the rotary embedding, ImportError without
    the `gguf` package."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, gguf_families.architecture_of(config))
    gguf_families.add_config(writer, config)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_tokenizer(writer, tokenizer, config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    factors = gguf_families.rope_factors(config)
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
        names = sorted(shapes, key=_by_number)
        tensors = [
            (tensor, tensor.shape(shapes), dtype if is_matrix(tensor.name) else "fp32")
            for tensor in gguf_families.file_tensors(config, names)
        ]
        for tensor, shape, held in tensors:
            stored = np.dtype("float32" if held == "fp32" else "float16")  # a placeholder for other types
            kind = gguf.GGMLQuantizationType[KINDS[held]]
            num_bytes = _num_bytes(math.prod(shape), held)
            writer.add_tensor_info(tensor.name, shape, stored, num_bytes, raw_dtype=kind)
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, _, held in tensors:
            writer.write_tensor_data(_encode(tensor.arrange(*map(file.get_tensor, tensor.sources)), held))
        if factors is not None:
            writer.write_tensor_data(factors)
    writer.close()


def is_matrix(name: str) -> bool:
    """True if a tensor has the type of the file, and not fp32."""
    return not name.endswith((".bias", "norm.weight", "ffn_gate_inp.weight", "attn_sinks.weight"))


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort key that puts expert 10 after expert 9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in name.split(".")]


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


def _add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Writes the tokens and merges of a byte-level tokenizer.json. The remaining ids are words that never occur in a
    text. The last one is the end token, which random weights hardly ever choose."""
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
