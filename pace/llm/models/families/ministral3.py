"""Ministral 3 and Devstral 2: Mistral with queries that grow with the position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Attention, LatentAttention, RopeConfig, Rotary, Temperature
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mistral import MistralConfig
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, number, token_ids
from pace.llm.models.rope_config import RopeReader
from pace.naming import shown

SCALE, PERIOD = "llama_4_scaling_beta", "original_max_position_embeddings"
"""Fields of the rotation that say how queries grow."""


@dataclass(frozen=True, kw_only=True)
class GrowingQueriesConfig:
    """How queries grow, combined with another config."""

    temperature_scale: float = 0.0
    """Queries are multiplied by `1 + temperature_scale * log(1 + position // temperature_period)`."""
    temperature_period: int = 1

    published_rope: ClassVar[dict[str, Any]] = {}
    """The rotation of a config without one."""

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        values = super().derived(fields)
        source, rope = self.rope_of(fields)
        if rope.get(SCALE) is None:
            return values
        reader = RopeReader(source, rope)
        return values | {
            "temperature_scale": reader.number(SCALE, None, -1e3, 1e3),
            "temperature_period": reader.length(PERIOD, fields.get(PERIOD), self.max_position_embeddings),
        }

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        source, rope = self.rope_of(fields)
        return super().read_rope(fields | {source: without_scale(rope)}, head_dim)

    @classmethod
    def rope_of(cls, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Returns the name of the field with the rotation, and its contents."""
        source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
        rope = fields.get(source)
        if rope is not None and not isinstance(rope, dict):
            raise ValueError(f"config.json: {source} must be an object or null; got {shown(rope)}")
        return source, cls.published_rope if rope is None else rope

    @property
    def query_dim(self) -> int:
        """Width of a query."""
        return self.head_dim


def without_scale(rope: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if name != SCALE}


class GrowingQueries(LlamaForCausalLM):
    """A Llama of a `GrowingQueriesConfig`."""

    def make_rotaries(self) -> tuple[Rotary | Temperature, ...]:
        config, rotaries = self.config, super().make_rotaries()
        if config.temperature_scale == 0.0:
            return rotaries
        tuning = Temperature(
            config.query_dim, config.temperature_period, config.temperature_scale, table=len(rotaries), offset=0
        )
        return (*rotaries, tuning)

    def make_attention(self, name: str, index: int) -> Attention | LatentAttention:
        attention = super().make_attention(name, index)
        if self.config.temperature_scale != 0.0:
            attention.temperature = self.rotaries[-1]
        return attention


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(GrowingQueriesConfig, MistralConfig):
    vocab_size: int = count(131072)
    num_hidden_layers: int = count(34, MAX_LAYERS)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(262144, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    sliding_window: int | None = count(None, MAX_POSITIONS, optional=True)
    pad_token_id: int | tuple[int, ...] | None = token_ids(11)

    without_effect: ClassVar[dict[str, tuple]] = {"layer_types": (None,)}
    published_rope: ClassVar[dict[str, Any]] = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        PERIOD: 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        SCALE: 0.1,
    }


class Ministral3ForCausalLM(GrowingQueries):
    Config = Ministral3Config
