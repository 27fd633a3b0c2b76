"""Config of families with layers that do not rotate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pace.llm.models.families.llama import LlamaConfig
from pace.llm.models.model_config import MAX_LAYERS, count, declared


def zeros_and_ones() -> Any:
    """A list of 0 and 1, or null."""

    def read(value: Any) -> tuple[int, ...] | None:
        if value is not None and not (
            isinstance(value, list) and all(type(item) is int and item in (0, 1) for item in value)
        ):
            raise ValueError("a list of 0 and 1, or null")
        return None if value is None else tuple(value)

    return declared(None, read)


@dataclass(frozen=True, kw_only=True)
class UnrotatedConfig(LlamaConfig):
    no_rope_layers: tuple[int, ...] | None = zeros_and_ones()
    """1 for a layer that rotates; null or an empty list for all but every `no_rope_layer_interval`-th."""
    no_rope_layer_interval: int = count(4, MAX_LAYERS)

    def check(self) -> None:
        super().check()
        if self.no_rope_layers and len(self.no_rope_layers) < self.num_hidden_layers:
            raise ValueError(
                f"config.json: no_rope_layers must have a number for each of {self.num_hidden_layers} layers;"
                f" got {len(self.no_rope_layers)}"
            )

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        rotate = tuple(int((layer + 1) % self.no_rope_layer_interval != 0) for layer in range(self.num_hidden_layers))
        return super().derived(fields) | {"no_rope_layers": self.no_rope_layers or rotate}

    def rotation(self, layer: int) -> int | None:
        return 0 if self.no_rope_layers[layer] else None
