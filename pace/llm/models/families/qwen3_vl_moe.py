"""Qwen3-VL-MoE (30B-A3B, 235B-A22B): Qwen3-MoE, which also takes the rows of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.mixture_config import mixture
from pace.llm.models.families.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from pace.llm.models.families.qwen_vl import OfQwen3VLConfig, SeesImages
from pace.llm.models.model_config import count
from pace.llm.models.towers.qwen_vision import Qwen3VisionTower
from pace.ops.experts import MAX_EXPERTS, Router


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeConfig(OfQwen3VLConfig, Qwen3MoeConfig):
    intermediate_size: int = count(5632)
    num_attention_heads: int = count(16)
    num_key_value_heads: int | None = count(16, optional=True)
    num_experts: int = count(60, MAX_EXPERTS)
    num_experts_per_tok: int = count(4, MAX_EXPERTS)
    moe_intermediate_size: int = count(1408)

    without_effect: ClassVar[dict[str, tuple]] = {"norm_topk_prob": (True,)}

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, normalise=True)


class Qwen3VLMoeForConditionalGeneration(SeesImages, Qwen3MoeForCausalLM):
    Config = Qwen3VLMoeConfig
    Tower = Qwen3VisionTower

    def make_experts(self, name: str) -> MixtureOfExperts:
        return mixture(self.config, name, self.config.moe_intermediate_size, transposed=True)
