"""The `vision_config` of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pace.batch import Positions
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, activation, count, declared, flag
from pace.llm.models.towers.vision_config import MAX_SIZE, TowerConfig, axial_theta
from pace.naming import shown


def layer_numbers(default: tuple[int, ...]) -> Any:
    """A list of different layers."""

    def read(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise ValueError("a list of numbers of layers")
        if len(set(value)) < len(value):
            raise ValueError("a list of different layers")
        return tuple(value)

    return declared(default, read)


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig(TowerConfig):
    """Fields of `vision_config` in config.json."""

    depth: int = count(32, MAX_LAYERS)
    hidden_size: int = count(1152, MAX_SIZE)
    hidden_act: str = activation("gelu_tanh")
    intermediate_size: int = count(4304)
    num_heads: int = count(16)
    in_channels: int = count(3, 64)
    patch_size: int = count(16, 512)
    spatial_merge_size: int = count(2, 8)
    temporal_patch_size: int = count(2, 16)
    out_hidden_size: int = count(3584)
    rope_parameters: float = axial_theta()
    splits_qkv: bool = flag(False)
    """True if queries, keys and values are separate tensors, as in some mmproj files."""

    def check(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"config.json: vision_config.hidden_size must be a multiple of 4 * num_heads; got {self.hidden_size} "
                f"and {self.num_heads} heads"
            )
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"config.json: vision_config.hidden_size / num_heads must be at most {MAX_HEAD_DIM}; got "
                f"{self.head_dim}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def cache(self) -> Positions:
        """What a block keeps of each patch."""
        return Positions(self.num_heads, self.head_dim, self.head_dim)

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Channels, frames, rows and columns of a patch."""
        return self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size

    @property
    def merged_size(self) -> int:
        """Floats of the patches that become one row."""
        return self.hidden_size * self.spatial_merge_size**2


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig(QwenVisionConfig):
    depth: int = count(27, MAX_LAYERS)
    num_position_embeddings: int = count(2304)
    deepstack_visual_indexes: tuple[int, ...] = layer_numbers((8, 16, 24))

    def check(self) -> None:
        super().check()
        if wrong := [block for block in self.deepstack_visual_indexes if block >= self.depth]:
            raise ValueError(
                f"config.json: vision_config.deepstack_visual_indexes must be below depth, {self.depth}; got {wrong[0]}"
            )
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(
                f"config.json: vision_config.num_position_embeddings must be a square; got "
                f"{self.num_position_embeddings}"
            )


@dataclass(frozen=True, kw_only=True)
class Qwen3_5VisionConfig(Qwen3VisionConfig):
    """The same without deepstack."""

    deepstack_visual_indexes: tuple[int, ...] = layer_numbers(())

    def check(self) -> None:
        if self.deepstack_visual_indexes:
            raise NotImplementedError(
                f"config.json: vision_config.deepstack_visual_indexes = {list(self.deepstack_visual_indexes)} is not "
                "implemented for Qwen3.5; implemented: []"
            )
        super().check()


@dataclass(frozen=True, kw_only=True)
class Qwen2VisionConfig(QwenVisionConfig):
    """Its `vision_config` has other names: `embed_dim` is the tower's size, and `hidden_size` the text model's."""

    hidden_size: int = count(1280, MAX_SIZE)
    intermediate_size: int = count(5120)
    hidden_act: str = activation("quick_gelu")
    patch_size: int = count(14, 512)

    @classmethod
    def read(cls, fields: Any) -> QwenVisionConfig:
        if not isinstance(fields, dict):
            return super().read(fields)
        size, ratio = fields.get("embed_dim", 1280), fields.get("mlp_ratio", 4)
        if type(size) is not int or type(ratio) not in (int, float) or not 0 < ratio < 100:
            raise ValueError(
                f"config.json: vision_config.embed_dim and mlp_ratio must be a size and a factor; got {shown(size)} "
                f"and {shown(ratio)}"
            )
        given = {
            "out_hidden_size": fields.get("hidden_size", 3584),
            "in_channels": fields.get("in_channels", fields.get("in_chans", 3)),
        }
        return super().read(fields | given | {"hidden_size": size, "intermediate_size": int(size * ratio)})


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VisionConfig(QwenVisionConfig):
    hidden_size: int = count(3584, MAX_SIZE)
    hidden_act: str = activation("silu")
    intermediate_size: int = count(3420)
    patch_size: int = count(14, 512)
    window_size: int = count(112)
    fullatt_block_indexes: tuple[int, ...] = layer_numbers((7, 15, 23, 31))

    def check(self) -> None:
        super().check()
        if self.window_size < self.spatial_merge_size * self.patch_size:
            raise ValueError(
                f"config.json: vision_config.window_size must be at least {self.spatial_merge_size * self.patch_size}, "
                f"the size of merged patches; got {self.window_size}"
            )
