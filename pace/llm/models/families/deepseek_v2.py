"""DeepSeek-V2 (V2, V2-Lite, Coder-V2): latent attention, and a mixture of experts with shared experts in all layers but
the first ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.latent import LatentConfig, LatentForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig, mixture, shared_mlp
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, declared, number
from pace.ops.experts import MAX_EXPERTS, Router
from pace.ops.protocol import Ops

TOPK_METHODS = ("greedy", "group_limited_greedy")


def read_topk_method(value: Any) -> str:
    if value not in TOPK_METHODS:
        raise NotImplementedError(f"{value!r} is not implemented; implemented: {', '.join(TOPK_METHODS)}")
    return value


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(MixtureConfig, LatentConfig):
    """Fields common to all DeepSeek families."""

    num_experts_per_tok: int | None = count(None, MAX_EXPERTS, optional=True)
    moe_intermediate_size: int = count(1407)
    n_shared_experts: int = count(2)
    routed_scaling_factor: float = number(1.0, -1e6, 1e6)
    n_group: int | None = count(None, MAX_EXPERTS, optional=True)
    topk_group: int | None = count(None, MAX_EXPERTS, optional=True)
    first_k_dense_replace: int = count(0, MAX_LAYERS, minimum=0)
    num_nextn_predict_layers: int = count(1, MAX_LAYERS, minimum=0)
    """Number of layers for multi-token prediction after the model's own layers."""

    aliases: ClassVar[dict[str, str]] = {
        "n_routed_experts": "num_experts",
        "num_local_experts": "num_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    also_read: ClassVar[frozenset[str]] = LatentConfig.also_read | {
        "aux_loss_alpha",
        "ep_size",
        "qk_head_dim",
        "router_aux_loss_coef",
        "seq_aux",
    }

    @property
    def chosen(self) -> int:
        """Number of experts per token."""
        if self.num_experts_per_tok is None:
            raise ValueError("num_experts_per_tok is missing")
        return self.num_experts_per_tok

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    vocab_size: int = count(102400)
    num_experts: int = count(64, MAX_EXPERTS)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    topk_method: str = declared("greedy", read_topk_method)

    without_effect: ClassVar[dict[str, tuple]] = {
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),
        "rope_interleave": (True,),
    }

    @property
    def router(self) -> Router:
        groups, kept = (self.n_group, self.topk_group) if self.topk_method == "group_limited_greedy" else (1, 1)
        if groups is None or kept is None:
            raise ValueError(f"topk_method {self.topk_method!r} needs n_group and topk_group; one is missing")
        return Router(self.num_experts, self.chosen, groups=groups, kept_groups=kept, scale=self.routed_scaling_factor)


class DeepseekV2ForCausalLM(LatentForCausalLM):
    Config = DeepseekV2Config

    def __init__(self, config: DeepseekConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.num_further_layers = config.num_nextn_predict_layers

    def make_experts(self, name: str) -> MixtureOfExperts:
        config, inner = self.config, self.config.moe_intermediate_size
        shared = shared_mlp(config, f"{name}.shared_experts", inner * config.n_shared_experts, config.mlp_bias)
        return mixture(config, name, inner, shared=shared)
