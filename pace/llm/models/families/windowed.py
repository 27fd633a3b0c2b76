"""Configs of families whose layers have a window: those where every n-th sees all positions, and those with a flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import RopeConfig
from pace.llm.models.families.llama import LlamaConfig
from pace.llm.models.layer_types import FULL, SLIDING, check_layer_types, every, layer_types
from pace.llm.models.model_config import MAX_POSITIONS, count, flag
from pace.llm.models.rope_config import fields_of_layers, read_rope


@dataclass(frozen=True, kw_only=True)
class SwitchedWindowConfig(LlamaConfig):
    """For families whose windows only count with a flag."""

    use_sliding_window: bool = flag(False)
    sliding_window: int | None = count(4096, MAX_POSITIONS, optional=True)
    layer_types: tuple[str, ...] | None = layer_types()

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)
        if SLIDING in (self.layer_types or ()) and self.effective_window is None:
            raise ValueError(
                "config.json: layer_types asks for sliding_attention, but use_sliding_window is false or "
                "sliding_window is null"
            )

    @property
    def effective_window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(LlamaConfig):
    sliding_window: int | None = count(4096, MAX_POSITIONS, optional=True)
    layer_types: tuple[str, ...] | None = layer_types()
    local_rope: RopeConfig | None = None
    """Rotation of the layers with a window; None if it is that of the others."""

    only_windows_rotate: ClassVar[bool] = False
    """True if layers without a window do not rotate."""

    @property
    def full_every(self) -> int:
        """Period of layers that see all positions, if `layer_types` is not given."""
        return 4

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)
        if self.sliding_window is None and SLIDING in self.types_of_layers:
            raise ValueError("config.json: sliding_window is null, but there are layers of sliding_attention")

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return super().derived(fields) | {"layer_types": self.types_of_layers}

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        return self.layer_types or every(self.full_every, self.num_hidden_layers)

    def slides(self, layer: int) -> bool:
        """True if a layer has a window."""
        return self.layer_types[layer] == SLIDING

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.slides(layer) else None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return super().ropes if self.local_rope is None else (self.rope, self.local_rope)

    def rotation(self, layer: int) -> int | None:
        if self.local_rope is not None:
            return int(self.slides(layer))
        return None if self.only_windows_rotate and not self.slides(layer) else super().rotation(layer)


@dataclass(frozen=True, kw_only=True)
class TwoRotationsConfig(WindowedConfig):
    """Config of families whose layers with a window have another rotation than the others. All layers see all
    positions, if `layer_types` is not given."""

    partial: ClassVar[bool] = False
    """True if a rotation may be of a part of a head."""
    default_partials: ClassVar[dict[str, float]] = {FULL: 1.0, SLIDING: 1.0}
    """Rotated part of a head if `rope_parameters` is not given."""

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        return self.layer_types or (FULL,) * self.num_hidden_layers

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        values = super().derived(fields)
        return values | {"local_rope": self.rope_of(SLIDING, fields, values["head_dim"])}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return self.rope_of(FULL, fields, head_dim)

    def rope_of(self, kind: str, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        """Returns the rotation of a kind of layers."""
        theta, part = {FULL: 5e5, SLIDING: 1e4}[kind], self.default_partials[kind]
        if fields.get("rope_parameters") is None:
            return read_rope(
                {}, head_dim, self.max_position_embeddings, partial=True, default_theta=theta, default_partial=part
            )
        own = fields_of_layers(fields, kind, scaled=False) | {"rope_theta": None}
        return read_rope(own, head_dim, self.max_position_embeddings, partial=self.partial, default_theta=theta)
