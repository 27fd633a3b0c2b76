"""OLMoE (1B-7B): OLMo 2's norms of queries and keys, norms before each branch, and a mixture of experts in every
layer. Queries, keys and values may be clipped, after the norms."""

from __future__ import annotations

from dataclasses import dataclass

from pace.llm.layers import Attention, MixtureOfExperts, WholeNorm
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig, mixture
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MixtureConfig, LlamaConfig):
    vocab_size: int = count(50304)
    hidden_size: int = count(2048)
    intermediate_size: int = count(2048)
    num_hidden_layers: int = count(16, MAX_LAYERS)
    num_attention_heads: int = count(16)
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    num_experts: int = count(64, MAX_EXPERTS)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)
    norm_topk_prob: bool = flag(False)
    clip_qkv: float | None = number(None, 0.0, 1e30, optional=True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(50279)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)

    @property
    def clip(self) -> float | None:
        return self.clip_qkv


class OlmoeForCausalLM(LlamaForCausalLM):
    Config = OlmoeConfig

    def make_attention(self, name: str, index: int) -> Attention:
        attention = super().make_attention(name, index)
        attention.clips_normalised = True
        return attention

    def make_head_norm(self, name: str, num_heads: int) -> WholeNorm:
        return WholeNorm(name, num_heads * self.config.head_dim, self.config.rms_norm_eps)

    def make_experts(self, name: str) -> MixtureOfExperts:
        return mixture(self.config, name, self.config.intermediate_size)
