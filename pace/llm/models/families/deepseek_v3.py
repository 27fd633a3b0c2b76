"""DeepSeek-V3 (V3, R1, Moonlight, Kimi K2): DeepSeek-V2 with sigmoid scores; experts and their groups are chosen by
biased scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.deepseek_v2 import DeepseekConfig, DeepseekV2ForCausalLM
from pace.llm.models.families.mixture_config import BiasedChoiceConfig, biased_mixture
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class LatentBiasedConfig(BiasedChoiceConfig, DeepseekConfig):
    """Config of latent attention and experts chosen by biased scores."""

    rope_interleave: bool = flag(True)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)

    without_effect: ClassVar[dict[str, tuple]] = {
        "mlp_bias": (False,),
        "moe_layer_freq": (1,),
    }

    @property
    def rotates_neighbours(self) -> bool:
        return self.rope_interleave


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(LatentBiasedConfig):
    vocab_size: int = count(129280)
    hidden_size: int = count(7168)
    intermediate_size: int = count(18432)
    moe_intermediate_size: int = count(2048)
    num_hidden_layers: int = count(61, MAX_LAYERS)
    num_attention_heads: int = count(128)
    num_key_value_heads: int | None = count(None, optional=True)
    num_experts: int = count(256, MAX_EXPERTS)
    routed_scaling_factor: float = number(2.5, -1e6, 1e6)
    n_group: int = count(8, MAX_EXPERTS)
    topk_group: int = count(4, MAX_EXPERTS)
    first_k_dense_replace: int = count(3, MAX_LAYERS, minimum=0)
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(1)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    Config = DeepseekV3Config

    def make_experts(self, name: str) -> MixtureOfExperts:
        return biased_mixture(self.config, name)
