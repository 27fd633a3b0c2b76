"""Number of places in a decoder layer where scales migrate, by family and variant."""

from __future__ import annotations

from pace.llm.layers import LatentAttention, Mamba, MixtureOfExperts, NoNorm, ParallelMixers, PlainMLP
from pace.llm.layers.block import NoFeedForward, NoMixer

PLACES = 4
"""Places in a layer of most families: two norms, the values, and the output of the up-projection."""

FEWER_OF_FAMILY = {"gptj": 2, "phi": 2, "starcoder2": 3, "gpt_neox": 3, "gpt2": 3}
FEWER_OF_FAMILY |= dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), 3)
FEWER_OF_FAMILY |= dict.fromkeys(("apertus", "apertus1p5_text", "bloom", "gpt_bigcode", "mpt"), 3)
FEWER_OF_FAMILY |= {"codegen": 2, "falcon": 2, "nanochat": 2, "olmo": 2}
FEWER_OF_FAMILY |= dict.fromkeys(("dbrx", "gemma4", "gemma4_text", "gemma4_unified_text"), 3)
"""Scales do not pass through GELU, xIELU, limits or norms of values. Parallel layers have one norm, and some norms have
no weights."""

OF_VARIANT = {
    "opt-gelu": 3, "opt-no-affine": 2, "stablelm-parallel": 3, "stablelm-2-12b": 3, "gpt2-act": 4,
    "apertus-silu-bias": 4, "bloom-norms": 1, "falcon-40b": 3, "falcon-new-mha-untied": 3, "falcon-rw": 3,
    "falcon-rw-mqa": 3, "mpt-clip": 2, "olmo-clip-bias": 1, "olmoe-clip": 3, "persimmon-no-norms-tied": 3,
}  # fmt: skip
"""Variants whose norms have no weights, or whose norm output is also the residual stream, among others."""


WITHOUT_PLACE = (LatentAttention, Mamba, ParallelMixers, NoMixer, NoFeedForward, NoNorm)
"""Parts of a layer that have no place. The projections of latents are left unchanged."""


def num_places(name: str, layer) -> int:
    """Number of places in one layer of a variant. A mixture has one per expert, unless the up-projection is clamped."""
    count = OF_VARIANT.get(name, FEWER_OF_FAMILY.get(name.split("-")[0], PLACES))
    parts = (layer.mixer_norm, layer.mixer, layer.mlp_norm, layer.mlp)
    count -= sum(isinstance(part, WITHOUT_PLACE) for part in parts)
    if isinstance(layer.mlp, PlainMLP) and layer.mlp.activation == "silu":
        count -= 1
    if not isinstance(layer.mlp, MixtureOfExperts):
        return count
    experts = layer.mlp.router.num_experts if isinstance(layer.mlp.activation, str) else 0
    return count - 1 + experts + (layer.mlp.shared is not None)
