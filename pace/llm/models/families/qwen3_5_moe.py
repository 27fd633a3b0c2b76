"""Qwen3.5, 3.6 and 3.8 with experts (35B-A3B): Qwen3.5 with a mixture and a gated shared expert in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.mixture_config import MixtureConfig
from pace.llm.models.families.qwen2_moe import Qwen2MoeForCausalLM
from pace.llm.models.families.qwen3_5 import OfQwen3_5, OfQwen3_5Config
from pace.llm.models.model_config import MAX_LAYERS, count
from pace.ops.experts import MAX_EXPERTS, Router


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(MixtureConfig, OfQwen3_5Config):
    hidden_size: int = count(2048)
    num_hidden_layers: int = count(40, MAX_LAYERS)
    num_experts: int = count(256, MAX_EXPERTS)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)
    moe_intermediate_size: int = count(512)
    shared_expert_intermediate_size: int = count(512)

    without_effect: ClassVar[dict[str, tuple]] = OfQwen3_5Config.without_effect | {
        "decoder_sparse_step": (1,),
        "norm_topk_prob": (True,),
    }

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, normalise=True)


class Qwen3_5MoeForConditionalGeneration(OfQwen3_5, Qwen2MoeForCausalLM):
    """`Qwen3_5MoeForCausalLM` is the same model without a tower."""

    Config = Qwen3_5MoeConfig
