"""Mixtral (8x7B, 8x22B): Mistral with two of eight experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import FeedForward, MixtureOfExperts, RouterLinear
from pace.llm.layers.experts import expert_stacks
from pace.llm.models.families.mistral import MistralConfig, MistralForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_POSITIONS, checked_router, count, number
from pace.llm.models.rope_config import with_theta
from pace.ops.experts import MAX_EXPERTS, Router


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MistralConfig):
    head_dim: int | None = count(None, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(4096 * 32, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    sliding_window: int | None = count(None, MAX_POSITIONS, optional=True)
    num_experts: int = count(8, MAX_EXPERTS)
    num_experts_per_tok: int = count(2, MAX_EXPERTS)

    aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    def check(self) -> None:
        super().check()
        checked_router(lambda: self.router)

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> Any:
        return super().read_rope(with_theta(fields, 1e6), head_dim)

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, normalise=True)


class MixtralForCausalLM(MistralForCausalLM):
    Config = MixtralConfig

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        config, block = self.config, f"{name}.{self.find_block()}"
        ...
