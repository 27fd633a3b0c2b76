"""LFM2-MoE (8B-A1B, 24B-A2B): LFM2 with experts in all but the first layers, chosen by biased sigmoids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import MixtureOfExperts, Vectors
from pace.llm.models.families.lfm2 import ConvolutionConfig, Lfm2ForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig, mixture
from pace.llm.models.model_config import MAX_LAYERS, count, flag, number
from pace.ops.experts import MAX_EXPERTS, Router


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(MixtureConfig, ConvolutionConfig):
    hidden_size: int = count(2048)
    intermediate_size: int = count(7168)
    moe_intermediate_size: int = count(1792)
    num_dense_layers: int = count(2, MAX_LAYERS, minimum=0)
    num_experts: int = count(32, MAX_EXPERTS)
    num_experts_per_tok: int = count(4, MAX_EXPERTS)
    use_expert_bias: bool = flag(True)
    routed_scaling_factor: float = number(1.0, -1e9, 1e9)
    norm_topk_prob: bool = flag(True)

    aliases: ClassVar[dict[str, str]] = ConvolutionConfig.aliases
    only_here: ClassVar[dict[str, tuple]] = {"scoring_func": (None, "sigmoid")}

    def check(self) -> None:
        super().check()
        if self.layer_types is None:
            raise ValueError("config.json: layer_types must name the kind of each layer; it is missing or null")

    @property
    def router(self) -> Router:
        return Router(
            self.num_experts,
            self.num_experts_per_tok,
            "sigmoid",
            normalise=self.norm_topk_prob,
            eps=1e-6,
            scale=self.routed_scaling_factor,
        )

    def has_experts(self, layer: int) -> bool:
        return layer >= self.num_dense_layers


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    Config = Lfm2MoeConfig

    def make_experts(self, name: str) -> MixtureOfExperts:
        config = self.config
        bias = Vectors({f"{name}.expert_bias": config.num_experts}) if config.use_expert_bias else None
        return mixture(config, name, config.moe_intermediate_size, choice_bias=bias)
