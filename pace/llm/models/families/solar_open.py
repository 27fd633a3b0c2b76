"""Solar-Open (100B-A12B): GLM-4-MoE with experts in every layer, rotated whole heads, and no norms of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.glm4_moe import Glm4MoeConfig, Glm4MoeForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, count


@dataclass(frozen=True, kw_only=True)
class SolarOpenConfig(Glm4MoeConfig):
    vocab_size: int = count(196608)
    num_hidden_layers: int = count(48, MAX_LAYERS)
    num_attention_heads: int = count(64)
    head_dim: int = count(128, MAX_HEAD_DIM)
    moe_intermediate_size: int = count(1280)
    first_k_dense_replace: int = count(0, 0, minimum=0)

    without_effect: ClassVar[dict[str, tuple]] = {"use_qk_norm": (False,), "first_k_dense_replace": (0,)}
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 1e6}


class SolarOpenForCausalLM(Glm4MoeForCausalLM):
    Config = SolarOpenConfig
