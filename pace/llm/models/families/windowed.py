"""Config of families whose layers have a window, except that every n-th sees all positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pace.llm.models.families.llama import LlamaConfig
from pace.llm.models.layer_types import SLIDING, check_layer_types, every, layer_types
from pace.llm.models.model_config import MAX_POSITIONS, count


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(LlamaConfig):
    sliding_window: int | None = count(4096, MAX_POSITIONS, optional=True)
    layer_types: tuple[str, ...] | None = layer_types()

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
