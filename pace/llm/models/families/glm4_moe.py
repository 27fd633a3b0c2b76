"""GLM-4-MoE (4.5, 4.6 and their Air): experts chosen by biased sigmoids, in groups, and a shared MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import HeadNorm, MixtureOfExperts, NoHeadNorm
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mixture_config import BiasedChoiceConfig, biased_mixture
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(BiasedChoiceConfig, LlamaConfig):
    vocab_size: int = count(151552)
    hidden_size: int = count(4096)
    intermediate_size: int = count(10944)
    num_hidden_layers: int = count(46, MAX_LAYERS)
    num_attention_heads: int = count(96)
    num_key_value_heads: int | None = count(8, optional=True)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    use_qk_norm: bool = flag(False)
    num_experts: int = count(128, MAX_EXPERTS)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)
    first_k_dense_replace: int = count(1, MAX_LAYERS, minimum=0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {"num_nextn_predict_layers"}
    output_bias: ClassVar[bool] = False
    floors_head_dim: ClassVar[bool] = True
    rope_options: ClassVar[dict[str, Any]] = {"partial": True, "default_partial": 0.5}

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


class Glm4MoeForCausalLM(LlamaForCausalLM):
    Config = Glm4MoeConfig
    num_further_layers = 1

    def make_head_norm(self, name: str, num_heads: int) -> HeadNorm | NoHeadNorm:
        config = self.config
        return HeadNorm(name, config.head_dim, config.rms_norm_eps) if config.use_qk_norm else NoHeadNorm()

    def make_experts(self, name: str) -> MixtureOfExperts:
        return biased_mixture(self.config, name)
