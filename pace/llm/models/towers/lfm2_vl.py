"""The vision tower of LFM2-VL: SigLIP 2 for images of any shape (NaFlex), and a projection of joined patches.

Source: `modeling_siglip2.py` and `modeling_lfm2_vl.py` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.llm.layers import LayerNorm, NoNorm
from pace.llm.models.model_config import activation, count, flag, read_declared
from pace.llm.models.towers.parts import RowMLP, join_patches
from pace.llm.models.towers.siglip import SiglipTower, SiglipVisionConfig
from pace.llm.models.towers.tower import RunSlice, near_square, rows_batch
from pace.media.media import Media, digest_of
from pace.naming import shown

PROJECTOR_EPS = 1e-5
"""Added to the variance in the norm of the projector; it is not in the config."""

TILE_SIDE = 32
"""Patches on a side of a tile of a large image, in all published checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Siglip2VisionConfig(SiglipVisionConfig):
    """Fields of `vision_config`."""

    model_types: ClassVar[tuple[str, ...]] = ("siglip2_vision_model",)
    num_patches: int = count(256)
    """Positions in the table, a square."""

    def check(self) -> None:
        super().check()
        if math.isqrt(self.num_patches) ** 2 != self.num_patches:
            raise ValueError(f"config.json: vision_config.num_patches must be a square; got {self.num_patches}")

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Floats of a patch: rows, columns and channels."""
        return (self.patch_size**2 * self.num_channels,)

    @property
    def patches_per_side(self) -> int:
        """Positions on a side of the table."""
        return math.isqrt(self.num_patches)


@dataclass(frozen=True, kw_only=True)
class Lfm2VlProjectorConfig:
    """Fields of config.json about the projector."""

    downsample_factor: int = count(2, 16)
    """Side of the square of patches that becomes one row."""
    projector_hidden_act: str = activation("gelu")
    projector_hidden_size: int = count(2560)
    projector_bias: bool = flag(True)
    projector_use_layernorm: bool = flag(True)

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Lfm2VlProjectorConfig:
        return cls(**read_declared(cls, raw))


class Lfm2VlTower(SiglipTower):
    """Media have the patches of tiles of one shape, and then those of the thumbnail. The projector's tensors are under
    `vision_tower.multi_modal_projector` here."""

    input_names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    config: Siglip2VisionConfig

    def __init__(self, config: Siglip2VisionConfig, projector: Lfm2VlProjectorConfig, width: int, placeholder: int):
        """`width`: the text's hidden_size."""
        super().__init__(config, placeholder)
        self.width = width
        self.factor = projector.downsample_factor
        name, joined = "vision_tower.multi_modal_projector", config.hidden_size * self.factor**2
        self.projector = RowMLP(
            LayerNorm(f"{name}.layer_norm", joined, PROJECTOR_EPS) if projector.projector_use_layernorm else NoNorm(),
            {f"{name}.linear_1": projector.projector_hidden_size},
            {f"{name}.linear_2": width},
            joined,
            projector.projector_hidden_act,
            projector.projector_bias,
        )

    def num_tokens(self) -> int:
        return self.config.num_patches // self.factor**2

    def pieces(self, media: Media) -> Iterator[Media]:
        if media.thumbnail is None:
            yield from super().pieces(media)
            return
        patches, tokens = math.prod(media.thumbnail), math.prod(media.thumbnail) // self.factor**2
        tiles = replace(
            media, features=media.features[:-patches], num_tokens=media.num_tokens - tokens, thumbnail=None, runs=()
        )
        yield from super().pieces(tiles)
        grid = (1, *media.thumbnail)
        yield replace(tiles, features=media.features[-patches:], grid=grid, num_tokens=tokens)

    def patches_of(self, media: Media) -> Tensor:
        return torch.from_numpy(media.features)

    def positions_of(self, media: Media) -> Tensor:
        tiles, rows, columns = media.grid
        side = self.config.patches_per_side
        weights = taps(rows, side)[:, None, :, None] * taps(columns, side)[None, :, None, :]
        return (weights.reshape(rows * columns, side * side) @ super().positions_of(media)).repeat(tiles, 1)

    def project(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        joined = join_patches(run(self.norm, rows_batch(x), ()), media.grid, self.factor)
        return run(self.projector, rows_batch(joined), ())

    # -- inputs

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        """Makes a medium of each tile: which of them are of one image, the arrays do not say."""
        pixels, mask, shapes = (array.detach().cpu() for array in self.arrays_of(inputs))
        (k,) = self.config.patch_shape
        if not pixels.is_floating_point() or pixels.ndim != 3 or pixels.shape[2] != k:
            raise ValueError(
                f"pixel_values must be floats [tiles, patches, {k}]; got {pixels.dtype} {list(pixels.shape)}"
            )
        if mask.shape != pixels.shape[:2] or shapes.shape != (len(pixels), 2):
            raise ValueError(
                f"pixel_attention_mask and spatial_shapes must be {list(pixels.shape[:2])} and [{len(pixels)}, 2] for "
                f"these pixel_values; got {list(mask.shape)} and {list(shapes.shape)}"
            )
        return [self._media(*tile, index) for index, tile in enumerate(zip(pixels, mask, shapes.tolist()))]

    def blank(self, num_tokens: int) -> Media:
        side = TILE_SIDE // self.factor
        tiles, rows, columns = num_tokens // side**2, side, side
        if not tiles:
            tiles, (rows, columns) = 1, near_square(num_tokens)
        grid = tiles, rows * self.factor, columns * self.factor
        features = np.zeros((math.prod(grid), *self.config.patch_shape), np.float32)
        return Media("image", features, grid, tiles * rows * columns, b"")

    def _media(self, pixels: Tensor, mask: Tensor, shape: list[int], index: int) -> Media:
        (rows, columns), factor, count = shape, self.factor, math.prod(shape)
        if min(shape) < factor or rows % factor or columns % factor or count > len(pixels):
            raise ValueError(
                f"spatial_shapes of tile {index} must be rows and columns in multiples of {factor}, with at most "
                f"{len(pixels)} patches; got {shown(shape)}"
            )
        if not mask[:count].all() or mask[count:].any():
            raise ValueError(f"pixel_attention_mask of tile {index} must be {count} ones, and then zeros")
        features = pixels[:count].float().contiguous().numpy()
        digest = digest_of(f"tile {shape} {features.shape} ", features)
        return Media("image", features, (1, rows, columns), count // factor**2, digest)


def taps(size: int, side: int) -> Tensor:
    """float32 `[size, side]`: the weights with which `side` positions of a table make `size` ones. They are those of
    torch's bilinear `interpolate(align_corners=False, antialias=True)`."""
    scale = torch.tensor(side) / torch.tensor(size, dtype=torch.float32)
    center = (torch.arange(size, dtype=torch.float32) + 0.5) * scale - 0.5
    source = torch.arange(side, dtype=torch.float32)
    weights = (1 - (source - center[:, None]).abs() / scale.clamp(min=1)).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)
