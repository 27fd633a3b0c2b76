"""Parameters of rotations that variants and tests share."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_WIDE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
"""With 16 pairs per head, the ramp between kept and stretched frequencies lies inside the head."""
YARN_PUBLISHED = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
"""The parameters of OLMo 3. Its attention factor is the one that follows from the factor."""


def mrope(sections: list[int], **parameters: Any) -> dict[str, Any]:
    """Returns the rotation of Qwen's vision models. `sections`: pairs of a head for time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **parameters}}


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    short = [1.0 + 0.1 * i for i in range(pairs)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": [2.0 + i for i in range(pairs)], **more}


def rope(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}, **more}


def by_kind(full: dict[str, Any], sliding: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns rotations that differ by the kind of layer."""
    kinds = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": {kind: {"rope_type": "default", **values} for kind, values in kinds.items()}, **more}
