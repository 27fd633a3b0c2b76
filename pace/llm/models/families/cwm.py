"""Code World Model: Llama with a window in all but the first of every four layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import RopeConfig
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.windowed import WindowedConfig
from pace.llm.models.layer_types import first_of_each
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, number, token_ids
from pace.llm.models.rope_config import read_rope

PUBLISHED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rotation of a config without one. Its `rope_theta` then has no effect."""


@dataclass(frozen=True, kw_only=True)
class CwmConfig(WindowedConfig):
    vocab_size: int = count(128256)
    hidden_size: int = count(6144)
    intermediate_size: int = count(21504)
    num_hidden_layers: int = count(64, MAX_LAYERS)
    num_attention_heads: int = count(48)
    num_key_value_heads: int | None = count(8)
    head_dim: int | None = count(128, MAX_HEAD_DIM)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    sliding_window: int | None = count(8192, MAX_POSITIONS, optional=True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(128000)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (False,)}

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        return self.layer_types or first_of_each(4, self.num_hidden_layers)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        ends = (128001, 128008, 128009) if self.eos_token_id is None else self.eos_token_id
        return super().derived(fields) | {"eos_token_id": ends}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        if not fields.get("rope_scaling") and fields.get("rope_parameters") is None:
            fields = fields | {"rope_parameters": PUBLISHED_ROPE}
        return read_rope(fields, head_dim, self.max_position_embeddings, default_theta=1e6)


class CwmForCausalLM(LlamaForCausalLM):
    Config = CwmConfig
