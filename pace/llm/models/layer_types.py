"""The field `layer_types` of a config.json: layers that see all positions, layers with a window, and layers with a
state."""

from __future__ import annotations

from typing import Any

from pace.llm.models.model_config import declared

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"
CONVOLUTION = "conv"


def layer_types(kinds: tuple[str, ...] = LAYER_TYPES) -> Any:
    """A field with the kind of attention of each layer, from `kinds`, or null."""

    def read(value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError("a list of strings or null")
        if other := sorted(set(value) - set(kinds)):
            raise NotImplementedError(f"{other[0]!r} is not implemented; implemented: {', '.join(kinds)}")
        return tuple(value)

    return declared(None, read)


def check_layer_types(types: tuple[str, ...] | None, num_layers: int) -> None:
    """Raises ValueError if `layer_types` is given and does not name all layers."""
    if types is not None and len(types) != num_layers:
        raise ValueError(f"config.json: layer_types must name all {num_layers} layers; got {len(types)}")


def first_of_each(period: int, num_layers: int) -> tuple[str, ...]:
    """Types in which the first of each `period` layers sees all positions, and the others have a window."""
    return tuple(SLIDING if layer % period else FULL for layer in range(num_layers))


def every(period: int, num_layers: int, other: str = SLIDING) -> tuple[str, ...]:
    """Types in which the last of each `period` layers sees all positions, and the others are of type `other`."""
    return tuple(FULL if (layer + 1) % period == 0 else other for layer in range(num_layers))
