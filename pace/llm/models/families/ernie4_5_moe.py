"""Ernie 4.5 with experts (21B-A3B, 300B-A47B), chosen by biased probabilities, and a shared MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.llm.layers import MixtureOfExperts, TensorSource, Vectors
from pace.llm.models.families.ernie4_5 import Ernie4_5ForCausalLM, Ernie45Config
from pace.llm.models.families.mixture_config import MixtureConfig, mixture, shared_mlp
from pace.llm.models.model_config import MAX_LAYERS, count, number
from pace.ops.experts import MAX_EXPERTS, Router
from pace.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class Ernie45MoeConfig(MixtureConfig, Ernie45Config):
    hidden_size: int = count(2560)
    intermediate_size: int = count(12288)
    num_hidden_layers: int = count(28, MAX_LAYERS)
    num_attention_heads: int = count(20)
    num_key_value_heads: int | None = count(4, optional=True)
    head_dim: int | None = count(None, optional=True)
    num_experts: int = count(64, MAX_EXPERTS)
    num_experts_per_tok: int = count(6, MAX_EXPERTS)
    moe_intermediate_size: int = count(1536)
    moe_num_shared_experts: int = count(2, minimum=0)
    moe_layer_start_index: int = count(1, MAX_LAYERS, minimum=0)
    moe_layer_end_index: int = count(-1, MAX_LAYERS, minimum=-1)
    """-1 for the last layer."""
    moe_layer_interval: int = count(1, MAX_LAYERS)
    moe_norm_min: float = number(1e-12, 0.0, 1.0)

    aliases: ClassVar[dict[str, str]] = {
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "num_local_experts": "num_experts",
    }
    without_effect: ClassVar[dict[str, tuple]] = {"moe_gate": ("topk",), "moe_use_aux_free": (True,)}
    also_read: ClassVar[frozenset[str]] = Ernie45Config.also_read | {
        "moe_capacity",
        "multi_token_pred_depth",
        "num_nextn_predict_layers",
    }

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, normalise=True, least_sum=self.moe_norm_min)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        return super().derived(fields) | {"moe_layer_end_index": last}

    def has_experts(self, layer: int) -> bool:
        first, last = self.moe_layer_start_index, self.moe_layer_end_index
        return first <= layer <= last and (layer + 1) % self.moe_layer_interval == 0


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    Config = Ernie45MoeConfig
    ignored_tensors = (*Ernie4_5ForCausalLM.ignored_tensors, r"(model\.)?mtp_.*")
    """The last pattern matches layers that predict further tokens."""
    other_names: ClassVar[dict[str, str]] = {r"(.*\.mlp)\.gate\.moe_statics\.": r"\1.moe_statics."}

    def __init__(self, config: Ernie45MoeConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.lm_head = self.make_head(config.hidden_size, bias=config.use_bias)

    def make_experts(self, name: str) -> MixtureOfExperts:
        config, count, inner = self.config, self.config.num_experts, self.config.moe_intermediate_size
        bias = f"{name}.moe_statics.e_score_correction_bias"
        shared = shared_mlp(config, f"{name}.shared_experts", inner * config.moe_num_shared_experts, config.use_bias)
        choice_bias = Vectors({bias: count}, {bias: TensorSource((1, count))})
        return mixture(config, name, inner, choice_bias=choice_bias, shared=shared)
