"""Converts the metadata of families similar to Llama to fields of a config.json that differ from a Llama's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from pace.checkpoints.gguf.file import Metadata

FULL_EVERY = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "cohere2": 4}
"""Architectures with windows -> period of layers with full attention, if the file does not state it."""
FULL, SLIDING = "full_attention", "sliding_attention"

Fields = dict[str, Any]


def gemma2(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    return fields | windows("gemma2", fields, metadata, 4096) | _scale(fields, layers_of_27b=46)


def gemma3(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    two = rotations(fields, metadata.number("gemma3.rope.freq_base_swa", 10000.0))
    return two | windows("gemma3", fields, metadata) | _scale(fields, layers_of_27b=62)


def _scale(fields: Fields, layers_of_27b: int) -> Fields:
    """Scale of the attention scores. Only the 27B model does not derive it from the head width."""
    is_27b = fields["num_hidden_layers"] == layers_of_27b  # llama.cpp uses the same criterion
    wide = fields["hidden_size"] // fields["num_attention_heads"]
    return {"query_pre_attn_scalar": wide if is_27b else fields["head_dim"]}


def olmo2(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    """An OLMo 3 is an OLMo 2 with windows."""
    found = windows("olmo2", fields, metadata)
    if "sliding_window" not in found:
        return fields
    two = rotations(fields, metadata.number("olmo2.rope.freq_base_swa", fields["rope_theta"]))
    return two | found | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}


def windows(architecture: str, fields: Fields, metadata: Metadata, default: int = 0) -> Fields:
    """Fields of sliding windows. Without a window, all layers see all positions."""
    layers = fields["num_hidden_layers"]
    window = metadata.integer(f"{architecture}.attention.sliding_window", default)
    if window == 0:
        return {"layer_types": [FULL] * layers}
    name = f"{architecture}.attention.sliding_window_pattern"
    pattern = metadata.get(name)
    if isinstance(pattern, np.ndarray):
        return {"sliding_window": window, "layer_types": [SLIDING if slides else FULL for slides in pattern.tolist()]}
    period = max(1, metadata.integer(name, FULL_EVERY[architecture]))
    types = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)]
    return {"sliding_window": window, "layer_types": types}


def rotations(fields: Fields, local_theta: float) -> Fields:
    """Returns `fields` with two rotations. The rotation of layers with a window has a separate base and is not
    scaled."""
    rope = ("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings")
    common = {name: fields[name] for name in fields.keys() & {"partial_rotary_factor"}}
    full = {"rope_theta": fields["rope_theta"], **(fields.get("rope_scaling") or {}), **common}
    kept = {name: value for name, value in fields.items() if name not in rope}
    return kept | {"rope_parameters": {FULL: full, SLIDING: {"rope_theta": local_theta, **common}}}


def cohere2(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    return fields | windows("cohere2", fields, metadata)


def command_r(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    return fields | {"use_qk_norm": "model.layers.0.self_attn.q_norm.weight" in tensors}


def ernie(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    return fields | {"use_bias": "model.layers.0.self_attn.q_proj.bias" in tensors}


def granite(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    """logit_scale is a divisor of the logits in these files."""
    divisor = fields.pop("logit_scale", None)
    return fields if divisor is None else fields | {"logits_scaling": divisor}


def minicpm(fields: Fields, metadata: Metadata, tensors: Collection[str]) -> Fields:
    """A file without the factors uses those of the first MiniCPM."""
    branch, logits = (metadata.number(f"minicpm.{name}_scale") for name in ("residual", "logit"))
    factors = ("embedding_multiplier", "residual_multiplier", "logit_scale")
    return {name: value for name, value in fields.items() if name not in factors} | {
        "scale_emb": metadata.number("minicpm.embedding_scale", 12.0),
        "scale_depth": 1.4 if branch is None else branch * fields["num_hidden_layers"] ** 0.5,
        "dim_model_base": _whole(fields["hidden_size"] / logits) if logits else 256.0,
    }


def _whole(value: float) -> float:
    """Rounds a quotient of rounded numbers to the integer it stands for, if it is close to one."""
    near = float(np.round(value))
    return near if abs(value - near) < 1e-4 * value else value


LLAMA_LIKE = {
    "cohere2": cohere2,
    "command-r": command_r,
    "ernie4_5": ernie,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "granite": granite,
    "minicpm": minicpm,
    "olmo2": olmo2,
}
"""Architecture -> function that changes its fields, as `FAMILIES` in families.py."""
