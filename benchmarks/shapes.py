"""Known model shapes, and checkpoints of random weights in them: what the benchmarks run without a download.

A checkpoint written here is a real one (config.json, model.safetensors, no tokenizer): it is loaded by the same code as
any other. Speed does not depend on the values of the weights, so random ones of a trained scale are as good as real ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

# Source: the config.json of each model on the Hub.
SHAPES: dict[str, dict] = {
    "qwen2.5-0.5b": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=896, intermediate_size=4864,
        num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936,
        max_position_embeddings=32768, rope_theta=1e6, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=True),
    "llama-3.2-1b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, vocab_size=128256,
        max_position_embeddings=131072, rope_theta=5e5, rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=True,
        rope_scaling=dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_max_position_embeddings=8192)),
}


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Llama or Qwen2 checkpoint with this config."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            shapes[f"{prefix}self_attn.{name}.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{prefix}self_attn.{name}.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, query)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    return shapes


def write_checkpoint(shape: str, directory: Path, dtype: torch.dtype = torch.bfloat16, num_layers: int | None = None) -> Path:
    """Writes a random checkpoint of `SHAPES[shape]` and returns its directory; one that is there already is kept.

    Weights are normal with a standard deviation of 0.02 (the usual initialiser_range), norm weights are one.
    """
    config = dict(SHAPES[shape], torch_dtype=str(dtype).removeprefix("torch."), bos_token_id=0, eos_token_id=1)
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    directory = Path(directory)
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dimensions in tensor_shapes(config).items():
        if "norm" in name:
            tensors[name] = torch.ones(dimensions, dtype=dtype)
        else:
            tensors[name] = torch.randn(dimensions, generator=generator).mul_(0.02).to(dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))   # last: its presence says the rest is complete
    return directory
