"""Mixtral (8x7B, 8x22B): Mistral with a mixture in every layer, two of eight experts per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.mistral import MistralConfig, MistralForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig, mixture
from pace.llm.models.model_config import MAX_POSITIONS, count, number
from pace.ops.experts import Router


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MixtureConfig, MistralConfig):
    max_position_embeddings: int = count(4096 * 32, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    sliding_window: int | None = count(None, MAX_POSITIONS, optional=True)

    only_here: ClassVar[dict[str, tuple]] = {"layer_types": (None,)}
    without_effect: ClassVar[dict[str, tuple]] = {"norm_topk_prob": (True,)}
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 1e6}

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, normalise=True)


class MixtralForCausalLM(MistralForCausalLM):
    Config = MixtralConfig
    other_names: ClassVar[dict[str, str]] = {
        r"(.*)\.block_sparse_moe\.(.*)": r"\1.mlp.\2",
        r"(.*\.experts\.\d+)\.w1\.(.*)": r"\1.gate_proj.\2",
        r"(.*\.experts\.\d+)\.w3\.(.*)": r"\1.up_proj.\2",
        r"(.*\.experts\.\d+)\.w2\.(.*)": r"\1.down_proj.\2",
    }

    def make_experts(self, name: str) -> MixtureOfExperts:
        return mixture(self.config, name, self.config.intermediate_size)
