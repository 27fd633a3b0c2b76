"""Hunyuan with experts (A13B): its dense kind with a mixture and an MLP beside it in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import FeedForward, MixtureOfExperts, RouterLinear, expert_stacks
from pace.llm.models.families.llama_like.hunyuan import HunYuanConfig, HunYuanDenseV1ForCausalLM
from pace.llm.models.families.mixtures.config import MixtureConfig, shared_mlp
from pace.llm.models.model_config import count
from pace.ops.experts import MAX_EXPERTS, Router

PER_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
"""Fields that may be lists, of a number for each layer."""


@dataclass(frozen=True, kw_only=True)
class HunYuanMoeConfig(MixtureConfig, HunYuanConfig):
    num_experts: int = count(1, MAX_EXPERTS)
    num_experts_per_tok: int = count(1, MAX_EXPERTS)

    aliases: ClassVar[dict[str, str]] = {"moe_topk": "num_experts_per_tok", "num_local_experts": "num_experts"}
    without_effect: ClassVar[dict[str, tuple]] = HunYuanConfig.without_effect | {
        "moe_intermediate_size": (None,),
        "num_shared_expert": (1,),
        "norm_topk_prob": (True,),
    }

    @classmethod
    def with_one_spelling(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Lists whose numbers are all the same stand for one."""
        same = {
            name: raw[name][0]
            for name in PER_LAYER
            if isinstance(raw.get(name), list) and raw[name] and all(value == raw[name][0] for value in raw[name])
        }
        return super().with_one_spelling(raw | same)

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, normalise=True)


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    Config = HunYuanMoeConfig

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        config, mlp = self.config, f"{name}.mlp"
        hidden, inner = config.hidden_size, config.intermediate_size
        return MixtureOfExperts(
            RouterLinear({f"{mlp}.gate.wg": config.num_experts}, hidden),
            config.router,
            *expert_stacks(f"{mlp}.experts", config.num_experts, hidden, inner),
            config.hidden_act,
            shared=shared_mlp(f"{mlp}.shared_mlp", hidden, inner, config.hidden_act),
        )
