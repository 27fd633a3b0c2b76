"""The places of a decoder layer where scales migrate, by family and variant."""

from __future__ import annotations

from pace.llm.layers import MixtureOfExperts
from tests.llm.models.families.latent_variants import LATENT_BASE
from tests.llm.models.families.mixture_variants import MIXTURE_BASE

PLACES = {"llama": 4, "mistral": 4, "qwen2": 4, "qwen3": 4, "phi3": 4, "opt": 4, "gptj": 2, "phi": 2, "gemma2": 4}
PLACES |= {"starcoder2": 3, "stablelm": 4, "gpt_neox": 3, "gpt2": 3, "chatglm": 4}
PLACES |= {"qwen2_vl": 4, "qwen2_5_vl": 4, "qwen3_vl": 4}
PLACES |= dict.fromkeys(("gemma3_text", "gemma3", "smollm3", "granite", "glm", "glm4", "ernie4_5", "minicpm"), 4)
PLACES |= {"hunyuan_v1_dense": 4, "olmo2": 2, "olmo3": 2, "cohere": 3, "cohere2": 3}
PLACES |= {family: 3 if family in LATENT_BASE else 4 for family in (*LATENT_BASE, *MIXTURE_BASE)}
"""In a layer: norms, values, and what an up-projection makes where the activation lets it through. GELU does not;
parallel layers have one norm, and OLMo's none. What latents become is left as it is."""
FEWER = {
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
    count = FEWER.get(name, PLACES[name.split("-")[0]])
    if not isinstance(layer.mlp, MixtureOfExperts):
        return count
    experts = layer.mlp.router.num_experts if isinstance(layer.mlp.activation, str) else 0
    return count - 1 + experts + (layer.mlp.shared is not None)
