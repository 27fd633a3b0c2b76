"""Granite with windows in all but the first of every four layers, sinks, and a rotation base for each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pace.llm.layers import Attention, RopeConfig, Vectors
from pace.llm.models.families.granite import GraniteConfig, GraniteForCausalLM
from pace.llm.models.families.windowed import WindowedConfig
from pace.llm.models.layer_types import first_of_each
from pace.llm.models.model_config import (
    MAX_LAYERS,
    MAX_POSITIONS,
    count,
    declared,
    flag,
    number,
    read_number,
    token_ids,
)


def bases() -> Any:
    """A list of numbers, each 0 or above 1; or null."""

    def read(value: Any) -> tuple[float, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) not in (int, float) or 0 < item <= 1 for item in value):
            raise ValueError("a list of numbers, each 0 or above 1; or null")
        return tuple(read_number(item, 0.0, 1e30) for item in value)

    return declared(None, read)


@dataclass(frozen=True, kw_only=True)
class GraniteSwaConfig(GraniteConfig, WindowedConfig):
    vocab_size: int = count(100352)
    hidden_size: int = count(2560)
    intermediate_size: int = count(8192)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    num_attention_heads: int = count(20)
    num_key_value_heads: int | None = count(4, optional=True)
    max_position_embeddings: int = count(8192, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    tie_word_embeddings: bool = flag(True)
    sliding_window: int | None = count(128, MAX_POSITIONS, optional=True)
    layer_rope_theta: tuple[float, ...] | None = bases()
    """The base of each layer, 0 for one that does not rotate; null for that of the rotation."""
    bos_token_id: int | tuple[int, ...] | None = token_ids(100257)
    eos_token_id: int | tuple[int, ...] | None = token_ids(100257)

    def check(self) -> None:
        super().check()
        if self.layer_rope_theta is not None and len(self.layer_rope_theta) != self.num_hidden_layers:
            raise ValueError(
                f"config.json: layer_rope_theta must have a number for each of {self.num_hidden_layers} layers; got "
                f"{len(self.layer_rope_theta)}"
            )

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        values = super().derived(fields)
        thetas = self.layer_rope_theta or (values["rope"].theta,) * self.num_hidden_layers
        return values | {"layer_rope_theta": thetas}

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        return self.layer_types or first_of_each(4, self.num_hidden_layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return tuple(replace(self.rope, theta=theta) for theta in sorted({*self.layer_rope_theta} - {0.0}))

    def rotation(self, layer: int) -> int | None:
        thetas = (rope.theta for rope in self.ropes)
        return next((index for index, theta in enumerate(thetas) if theta == self.layer_rope_theta[layer]), None)


class GraniteSWAForCausalLM(GraniteForCausalLM):
    Config = GraniteSwaConfig

    def make_attention(self, name: str, index: int) -> Attention:
        attention = super().make_attention(name, index)
        attention.sinks = Vectors({f"{name}.sinks": self.config.num_attention_heads})
        return attention
