"""Phi-3.5-MoE: Mixtral with layer norms, biases, the sparsemixer choice of two experts, and longrope."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from pace.llm.layers import LayerNorm, RopeConfig
from pace.llm.models.families.llama import LlamaConfig
from pace.llm.models.families.mixtral import MixtralConfig, MixtralForCausalLM
from pace.llm.models.model_config import MAX_POSITIONS, count, flag, number
from pace.llm.models.rope_config import KIND_NAMES, RopeReader, first_long, read_rope
from pace.ops.experts import MAX_EXPERTS, Router
from pace.ops.protocol import Ops

logger = logging.getLogger("pace")

SCALES = ("short_mscale", "long_mscale")
"""Factors of cosines and sines with the short factors, and with the long ones."""


@dataclass(frozen=True, kw_only=True)
class PhimoeConfig(MixtralConfig):
    vocab_size: int = count(32064)
    intermediate_size: int = count(6400)
    max_position_embeddings: int = count(4096 * 32, MAX_POSITIONS)
    attention_bias: bool = flag(False)
    lm_head_bias: bool = flag(False)
    num_experts: int = count(16, MAX_EXPERTS)
    router_jitter_noise: float = number(0.01, 0.0, 1.0)

    without_effect: ClassVar[dict[str, tuple]] = {"num_experts_per_tok": (2,)}
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {"input_jitter_noise"}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
        reader = RopeReader(source, fields.get(source))
        rope = read_rope(
            fields | {source: {name: value for name, value in reader.values.items() if name not in SCALES}},
            head_dim,
            self.max_position_embeddings,
            kinds=("default", "longrope"),
            kind_names=KIND_NAMES,
            default_theta=1e6,
        )
        if rope.kind == "default":
            return rope
        if reader.values.get("attention_factor") is not None:
            logger.warning("config.json: %s.attention_factor is ignored: %s count", source, " and ".join(SCALES))
        short, long = (reader.number(name, None, 0.0, 1e3) for name in SCALES)
        return replace(rope, attention_factor=short, long_attention_factor=long)

    @property
    def router(self) -> Router:
        return Router(self.num_experts, 2, "sparsemixer", jitter=self.router_jitter_noise)


class PhimoeForCausalLM(MixtralForCausalLM):
    """A sequence longer than the original length uses the long rotation factors, as published. transformers 5.23 keeps
    the short factors, with the long scale."""

    Config = PhimoeConfig
    other_names: ClassVar[dict[str, str]] = MixtralForCausalLM.other_names | {
        r"(.*)\.mlp\.router\.(.*)": r"\1.mlp.gate.\2"
    }

    def __init__(self, config: PhimoeConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.lm_head = self.make_head(config.hidden_size, bias=config.lm_head_bias)

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.rms_norm_eps)

    @property
    def recompute_length(self) -> int | None:
        """Same rule as for Phi-3."""
        return first_long(self.config.rope)
