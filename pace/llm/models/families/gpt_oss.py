"""gpt-oss (20b, 120b): experts with biases and a clamped activation, attention with sinks, and a window on every other
layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import (
    Attention,
    ExpertLinear,
    FeedForward,
    MixtureOfExperts,
    RopeConfig,
    RouterLinear,
    Vectors,
)
from pace.llm.layers.experts import fused, one_by_one, stacked
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig
from pace.llm.models.layer_types import check_layer_types, layer_types
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.llm.models.rope_config import read_rope
from pace.ops.experts import MAX_EXPERTS, ClampedSwiglu, Router

PUBLISHED_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Default rotation, if config.json has none."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MixtureConfig, LlamaConfig):
    vocab_size: int = count(201088)
    hidden_size: int = count(2880)
    intermediate_size: int = count(2880)
    num_hidden_layers: int = count(36, MAX_LAYERS)
    num_attention_heads: int = count(64)
    num_key_value_heads: int | None = count(8, optional=True)
    head_dim: int | None = count(64, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    attention_bias: bool = flag(True)
    sliding_window: int | None = count(128, MAX_POSITIONS, optional=True)
    layer_types: tuple[str, ...] | None = layer_types()
    num_experts: int = count(128, MAX_EXPERTS)
    num_experts_per_tok: int = count(4, MAX_EXPERTS)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)
    swiglu_alpha: float = number(1.702, -1e6, 1e6)
    swiglu_limit: float = number(7.0, 1e-6, 1e9)

    only_here: ClassVar[dict[str, tuple]] = {"hidden_act": ("silu",)}
    without_effect: ClassVar[dict[str, tuple]] = {"experts_per_token": (4,)}
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {"initial_context_length"}

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        if not fields.get("rope_scaling") and not fields.get("rope_parameters"):
            fields = fields | {"rope_parameters": PUBLISHED_ROPE}
        return read_rope(fields, head_dim, self.max_position_embeddings, default_theta=150000.0)

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, "softmax_of_chosen")

    def window(self, layer: int) -> int | None:
        slides = self.layer_types[layer] == "sliding_attention" if self.layer_types else layer % 2 == 0
        return self.sliding_window if slides else None


class GptOssForCausalLM(LlamaForCausalLM):
    Config = GptOssConfig

    def make_attention(self, name: str, index: int) -> Attention:
        attention = super().make_attention(name, index)
        attention.sinks = Vectors({f"{name}.sinks": self.config.num_attention_heads})
        return attention

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        """Makes the mixture of a layer. In checkpoints, float experts are transposed, MXFP4 ones are not. Rows of gate
        and up alternate; in GGUF they are separate tensors."""
        config, experts = self.config, f"{name}.mlp.experts"
        count, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        gate_up = ExpertLinear(
            count,
            hidden,
            fused(f"{experts}.gate_up_proj", 2 * inner, count, hidden, transposed=True, interleaved=True),
            fused(f"{experts}.gate_up_proj", 2 * inner, count, hidden, interleaved=True, quantised=True),
            stacked(experts, ("gate_proj", "up_proj"), inner, count, hidden),
            one_by_one(experts, ("gate_proj", "up_proj"), inner),
            glu=True,
            bias=True,
        )
        down = ExpertLinear(
            count,
            inner,
            fused(f"{experts}.down_proj", hidden, count, inner, transposed=True),
            fused(f"{experts}.down_proj", hidden, count, inner, quantised=True),
            stacked(experts, ("down_proj",), hidden, count, inner),
            one_by_one(experts, ("down_proj",), hidden),
            bias=True,
        )
        return MixtureOfExperts(
            RouterLinear({f"{name}.mlp.router": count}, hidden, bias=True),
            config.router,
            gate_up,
            down,
            ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit),
        )
