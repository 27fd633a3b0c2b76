"""The places of a decoder layer where scales migrate, by family and variant."""

from __future__ import annotations

from pace.llm.layers import MixtureOfExperts
from tests.llm.models.families.latent_variants import LATENT_BASE

PLACES = 4
"""In a layer of most families: two norms, values, and what an up-projection makes."""

FEWER_OF_FAMILY = dict.fromkeys(LATENT_BASE, 3)
FEWER_OF_FAMILY |= {"gptj": 2, "phi": 2, "starcoder2": 3, "gpt_neox": 3, "gpt2": 3}
FEWER_OF_FAMILY |= {"olmo2": 2, "olmo3": 2, "cohere": 3, "cohere2": 3}
"""GELU lets no scale through, parallel layers have one norm, OLMo's none. What latents become is left as it is."""

OF_VARIANT = {
    "opt-350m": 2,
    "opt-post-norm": 2,
    "opt-gelu": 3,
    "opt-no-affine": 2,
    "stablelm-parallel": 3,
    "stablelm-2-12b": 3,
    "gpt2-act": 4,
}
"""Norms without weights, or whose output is the residual stream, too."""


def num_places(name: str, layer) -> int:
    """In one layer of a variant; of a mixture, one in each expert, but not past an up that is clamped."""
    count = OF_VARIANT.get(name, FEWER_OF_FAMILY.get(name.split("-")[0], PLACES))
    if not isinstance(layer.mlp, MixtureOfExperts):
        return count
    experts = layer.mlp.router.num_experts if isinstance(layer.mlp.activation, str) else 0
    return count - 1 + experts + (layer.mlp.shared is not None)
