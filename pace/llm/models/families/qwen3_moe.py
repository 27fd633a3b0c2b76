"""Qwen3-MoE (30B-A3B, 235B-A22B, Qwen3-Coder): Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.mixture_config import mixture
from pace.llm.models.families.qwen2_moe import Qwen2MoeForCausalLM, QwenMixtureConfig
from pace.llm.models.families.qwen3 import Qwen3Config
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, count
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(QwenMixtureConfig, Qwen3Config):
    hidden_size: int = count(2048)
    intermediate_size: int = count(6144)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    num_key_value_heads: int | None = count(4, optional=True)
    head_dim: int | None = count(None, MAX_HEAD_DIM, optional=True)
    num_experts: int = count(128, MAX_EXPERTS)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)
    moe_intermediate_size: int = count(768)

    only_here: ClassVar[dict[str, tuple]] = {
        "shared_expert_intermediate_size": (None, 0),
        "use_qk_norm": (None, True),
        "qkv_bias": (None, False),
    }

    def window(self, layer: int) -> int | None:
        """The same window for all layers, as in `transformers`, which ignores `max_window_layers`."""
        return self.effective_window


class Qwen3MoeForCausalLM(Qwen2MoeForCausalLM):
    Config = Qwen3MoeConfig
    head_norm = True

    def make_experts(self, name: str) -> MixtureOfExperts:
        return mixture(self.config, name, self.config.moe_intermediate_size)
