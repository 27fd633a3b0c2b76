"""Files of EAGLE-3 drafters, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from benchmarks.comparison.gguf_families import permute, rope_factors
from tests.checkpoints.gguf.files import finish

NAMES = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "input_layernorm": "blk.0.attn_norm",
    "hidden_norm": "blk.0.attn_norm_2",
    "post_attention_layernorm": "blk.0.ffn_norm",
    **{f"self_attn.{part}_proj": f"blk.0.attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "blk.0.attn_output",
    **{f"mlp.{part}_proj": f"blk.0.ffn_{part}" for part in ("gate", "up", "down")},
}
"""The names of llama.cpp's converter."""


def write_eagle3(
    path: Path, state: dict[str, Tensor], config: dict[str, Any], left_out: Collection[str] = (), **keys: Any
) -> None:
    """Writes a drafter as llama.cpp's converter does. `keys` replace keys; None leaves one out."""
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_vocab_size(config["vocab_size"])
    known = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": 1,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        **{f"attention.{part}_length": config["head_dim"] for part in ("key", "value")},
        "rope.dimension_count": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "target_layers": config["eagle_aux_hidden_state_layer_ids"],
        "target_hidden_size": config["target_hidden_size"],
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", False),
    }
    adders = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (known | keys).items():
        if value is not None:
            adders[type(value)](f"eagle3.{key}", value)
    for name, tensor in state.items():
        module = name.removeprefix("midlayer.").removesuffix(".weight")
        if module.endswith(("q_proj", "k_proj")):
            tensor = permute(tensor, config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"])
        if name == "d2t" and name not in left_out:
            ids = (tensor + torch.arange(len(tensor))).numpy()
            writer.add_tensor("d2t", ids, raw_dtype=gguf.GGMLQuantizationType.I64)
        elif module in NAMES and name not in left_out:
            writer.add_tensor(f"{NAMES[module]}.weight", tensor.contiguous().numpy())
    if "rope_scaling" in config:
        writer.add_tensor("rope_freqs.weight", rope_factors({"rope_theta": 10000.0, **config}))
    finish(writer)
