"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2 with a mixture of experts and a gated shared expert in most layers."""

from __future__ import annotations

from dataclasses import dataclass

from pace.llm.layers import MixtureOfExperts, RouterLinear
from pace.llm.models.families.mixture_config import MixtureConfig, layer_numbers, mixture, shared_mlp
from pace.llm.models.families.qwen2 import Qwen2Config, Qwen2ForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class QwenMixtureConfig(MixtureConfig):
    """Fields of Qwen's mixtures, in addition to those of the dense models."""

    norm_topk_prob: bool = flag(False)
    decoder_sparse_step: int = count(1, MAX_LAYERS)
    mlp_only_layers: tuple[int, ...] = layer_numbers()

    def has_experts(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(QwenMixtureConfig, Qwen2Config):
    hidden_size: int = count(2048)
    intermediate_size: int = count(5632)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    num_attention_heads: int = count(16)
    num_key_value_heads: int | None = count(16, optional=True)
    sliding_window: int | None = count(4096, MAX_POSITIONS, minimum=0, optional=True)
    """May be 0 if `use_sliding_window` is false, as `transformers` writes it."""
    qkv_bias: bool = flag(True)
    num_experts: int = count(60, MAX_EXPERTS)
    num_experts_per_tok: int = count(4, MAX_EXPERTS)
    moe_intermediate_size: int = count(1408)
    shared_expert_intermediate_size: int = count(5632)

    @property
    def effective_window(self) -> int | None:
        return super().effective_window or None

    def window(self, layer: int) -> int | None:
        if self.layer_types is not None:
            return super().window(layer)
        return self.effective_window if layer % 2 == 0 and layer < self.max_window_layers else None


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    Config = Qwen2MoeConfig

    def make_experts(self, name: str) -> MixtureOfExperts:
        config = self.config
        shared = shared_mlp(config, f"{name}.shared_expert", config.shared_expert_intermediate_size)
        gate = RouterLinear({f"{name}.shared_expert_gate": 1}, config.hidden_size)
        return mixture(config, name, config.moe_intermediate_size, shared=shared, shared_gate=gate)
