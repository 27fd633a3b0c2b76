"""FlexOlmo 7x7B: OLMo 2 with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import FeedForward, RopeConfig
from pace.llm.models.families.mixture_config import MixtureConfig
from pace.llm.models.families.olmo import Olmo2Config, Olmo2ForCausalLM
from pace.llm.models.families.olmoe import olmoe_mixture
from pace.llm.models.model_config import MAX_POSITIONS, count, flag, number, token_ids
from pace.llm.models.rope_config import read_rope
from pace.ops.experts import MAX_EXPERTS, Router


@dataclass(frozen=True, kw_only=True)
class FlexOlmoConfig(MixtureConfig, Olmo2Config):
    vocab_size: int = count(100352)
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-6, 0.0, 1.0)
    num_experts: int = count(7, MAX_EXPERTS)
    num_experts_per_tok: int = count(5, MAX_EXPERTS)
    norm_topk_prob: bool = flag(False)
    eos_token_id: int | tuple[int, ...] | None = token_ids(100257)
    pad_token_id: int | tuple[int, ...] | None = token_ids(100277)

    aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return read_rope(fields, head_dim, self.max_position_embeddings, default_theta=5e5)

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, normalise=self.norm_topk_prob)


class FlexOlmoForCausalLM(Olmo2ForCausalLM):
    Config = FlexOlmoConfig

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        return olmoe_mixture(self.config, f"{name}.mlp")
