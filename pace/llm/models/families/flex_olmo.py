"""FlexOlmo 7x7B: OLMo 2 with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.mixture_config import MixtureConfig, mixture
from pace.llm.models.families.olmo import Olmo2Config, Olmo2ForCausalLM
from pace.llm.models.model_config import MAX_POSITIONS, count, flag, number, token_ids
from pace.ops.experts import MAX_EXPERTS


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

    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 5e5}


class FlexOlmoForCausalLM(Olmo2ForCausalLM):
    Config = FlexOlmoConfig

    def make_experts(self, name: str) -> MixtureOfExperts:
        return mixture(self.config, name, self.config.intermediate_size)
