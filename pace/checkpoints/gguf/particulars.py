"""What the config.json of single architectures has that GGUF files say in another way, or leave to the reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pace.checkpoints.gguf.file import Metadata

BIASES = {
    name: "attention_bias"
    for name in ("llama", "qwen3", "gemma2", "gemma3", "smollm3", "granite", "olmo2", "glm4", "hunyuan-dense", "command-r", "cohere2")
} | {"ernie4_5": "use_bias"}  # fmt: skip
"""The field that says whether queries have biases, of architectures that may have them or not."""

FULL_EVERY = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "cohere2": 4}
"""Of architectures with windows: layers from one that sees all positions to the next, where the file does not say."""
FULL, SLIDING = "full_attention", "sliding_attention"


def windows(metadata: Metadata, key: Callable[[str], str], architecture: str, num_layers: int) -> dict[str, Any]:
    """The fields about windows. Without the key there are none, but in Gemma 2. OLMo 3 is an OLMo 2 that has some."""
    window = metadata.integer(key("attention.sliding_window"), 4096 if architecture == "gemma2" else 0)
    if window == 0:
        return {} if architecture == "olmo2" else {"layer_types": [FULL] * num_layers}
    name = key("attention.sliding_window_pattern")
    pattern = metadata.get(name)
    if isinstance(pattern, np.ndarray):
        types = [SLIDING if slides else FULL for slides in pattern.tolist()]
    else:
        period = max(1, metadata.integer(name, FULL_EVERY[architecture]))
        types = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers)]
    olmo3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"} if architecture == "olmo2" else {}
    return {"sliding_window": window, "layer_types": types, **olmo3}


def rotations(metadata: Metadata, key: Callable[[str], str], architecture: str, rope: dict[str, Any]) -> dict[str, Any]:
    """The fields about rotation of an architecture with windows: where its layers rotate in two ways, those with one
    are not scaled, and have a base of their own."""
    if architecture not in ("gemma3", "olmo2") or (
        architecture == "olmo2" and not metadata.integer(key("attention.sliding_window"), 0)
    ):
        return rope
    common = {name: rope[name] for name in rope.keys() & {"partial_rotary_factor"}}
    theta = metadata.number(key("rope.freq_base_swa"), 10000.0 if architecture == "gemma3" else rope["rope_theta"])
    full = {"rope_theta": rope["rope_theta"], **(rope.get("rope_scaling") or {}), **common}
    return {"rope_parameters": {FULL: full, SLIDING: {"rope_theta": theta, **common}}}


def particulars(
    metadata: Metadata, key: Callable[[str], str], architecture: str, fields: dict[str, Any]
) -> dict[str, Any]:
    """Fields that follow from others."""
    hidden, layers, heads = (fields[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    if architecture in ("gemma2", "gemma3"):
        is_27b = layers == {"gemma2": 46, "gemma3": 62}[architecture]  # llama.cpp tells it by this, too
        return {"query_pre_attn_scalar": hidden // heads if is_27b else fields["head_dim"]}
    if architecture == "minicpm":
        # A file without these factors has those of the first MiniCPM.
        branch = metadata.number(key("residual_scale"))
        logits = metadata.number(key("logit_scale"))
        return {
            **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logit_scale")),
            "scale_emb": metadata.number(key("embedding_scale"), 12.0),
            "scale_depth": 1.4 if branch is None else branch * layers**0.5,
            "dim_model_base": _whole(hidden / logits) if logits else 256.0,
        }
    return {}


def _whole(value: float) -> float:
    """The whole number that a quotient of rounded numbers was meant to be."""
    near = float(np.round(value))
    return near if abs(value - near) < 1e-4 * value else value
