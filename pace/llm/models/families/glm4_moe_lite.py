"""GLM-4.7-Flash: DeepSeek-V3 with its own sizes, whose config lists the layers that have experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.deepseek_v3 import DeepseekV3ForCausalLM, LatentBiasedConfig
from pace.llm.models.families.mixture_config import ListedMixturesConfig
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, number, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(ListedMixturesConfig, LatentBiasedConfig):
    vocab_size: int = count(154880)
    hidden_size: int = count(2048)
    intermediate_size: int = count(10240)
    moe_intermediate_size: int = count(1536)
    num_hidden_layers: int = count(47, MAX_LAYERS)
    num_attention_heads: int = count(20)
    num_key_value_heads: int | None = count(None, optional=True)
    num_experts: int = count(64, MAX_EXPERTS)
    num_experts_per_tok: int = count(4, MAX_EXPERTS)
    routed_scaling_factor: float = number(1.8, -1e6, 1e6)
    n_group: int = count(1, MAX_EXPERTS)
    topk_group: int = count(1, MAX_EXPERTS)
    q_lora_rank: int | None = count(768, optional=True)
    qk_nope_head_dim: int = count(192)
    v_head_dim: int = count(256)
    max_position_embeddings: int = count(202752, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(1)
    num_dense: ClassVar[int] = 1

    aliases: ClassVar[dict[str, str]] = LatentBiasedConfig.aliases | {"head_dim": "qk_rope_head_dim"}
    without_effect: ClassVar[dict[str, tuple]] = LatentBiasedConfig.without_effect | {"first_k_dense_replace": (1,)}


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    Config = Glm4MoeLiteConfig
