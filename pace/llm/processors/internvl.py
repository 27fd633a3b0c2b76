"""Images of InternVL: `GotOcr2ImageProcessor` of transformers, as `InternVLProcessor` uses it. Checkpoints of
InternVLChatModel have their settings in config.json.

An image is stretched to the grid of square tiles whose shape is nearest to its own. The tiles are followed by the whole
image, stretched to one tile, unless the grid is a single tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from pace.llm.models.model_config import count
from pace.llm.models.towers.internvl_config import MAX_SIDE, MAX_TILES, ChatFields, read_internvl_vision
from pace.llm.processors.image_processor import (
    ONLY,
    WITHOUT_EFFECT,
    ImageProcessor,
    backends,
    channels,
    limit_of,
    nearest_grid,
    square,
)
from pace.media.images import image_size
from pace.media.media import Layout, Media, MediaError
from pace.media.patches import cut_tiles, normalised, resize
from pace.naming import counted

Grid = tuple[int, int]
"""Columns and rows of tiles."""


@dataclass(frozen=True, kw_only=True)
class InternVLImageProcessor(ImageProcessor):
    """Processor with the settings of one checkpoint. `for_model` adds the number of tokens of a tile."""

    token: ClassVar[str] = "<IMG_CONTEXT>"
    marker: ClassVar[str] = token
    placeholder: ClassVar[str] = "<IMG_CONTEXT>\n"
    only: ClassVar[Mapping[str, tuple]] = ONLY | backends("GotOcr2ImageProcessor")
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {"crop_to_patches"}
    """InternVLProcessor cuts images into tiles also where `crop_to_patches` is false."""

    size: int = square(384, MAX_SIDE)
    """Side of a tile in pixels."""
    min_patches: int = count(1, MAX_TILES)
    max_patches: int = count(12, MAX_TILES)
    """Tiles of an image, without that of the whole image."""
    image_mean: tuple[float, ...] = channels((0.48145466, 0.4578275, 0.40821073), -1e6)
    image_std: tuple[float, ...] = channels((0.26862954, 0.26130258, 0.27577711), 1e-6)
    use_thumbnail: bool = True
    """True if several tiles are followed by one of the whole image."""
    tokens_per_tile: int = 256
    tile_patches: int = 32
    """Patches on a side of a tile."""

    def for_model(self, config: dict[str, Any]) -> Self:
        """Returns this processor with the tokens and patches of a tile. Raises ValueError for tiles that the tower of
        config.json cannot take."""
        if not isinstance(config.get("vision_config"), dict):
            return self
        vision = read_internvl_vision(config)
        patches = self.size // vision.patch_size
        if not patches or patches % vision.merge:
            raise ValueError(
                f"size has {patches} patches of {vision.patch_size} pixels on a side; the tower of config.json needs a "
                f"multiple of {vision.merge}, 1 / downsample_ratio"
            )
        return replace(self, tokens_per_tile=(patches // vision.merge) ** 2, tile_patches=patches)

    @property
    def least_tokens(self) -> int:
        return self.tokens_per_tile

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes, resizes and cuts an image, as `MediaProcessor` says. The features are float32 `[T, 3, S, S]`: the
        pixels of T tiles."""
        image, (columns, rows), digest = self.decode(source, lambda *size: self.grid(*size, max_tokens))
        tile = self.size
        pixels = resize(image, rows * tile, columns * tile, self.resample)
        tiles = list(cut_tiles(pixels, tile))
        if len(tiles) > 1 and self.use_thumbnail:
            tiles.append(resize(image, tile, tile, self.resample))
        return Media(
            kind=self.kind,
            features=normalised(np.stack(tiles), self.table),
            grid=(len(tiles), self.tile_patches, self.tile_patches),
            num_tokens=len(tiles) * self.tokens_per_tile,
            digest=digest,
        )

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        """The tokens of all tiles, between the beginning and the end of an image."""
        columns, rows = self.grid(*image_size(source), max_tokens)
        num_tiles = columns * rows + (columns * rows > 1 and self.use_thumbnail)
        num_tokens = num_tiles * self.tokens_per_tile
        return Layout(f"<img>{self.token * num_tokens}</img>", (num_tokens,))

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """`pixel_values` float32 `[sum of T, 3, S, S]`."""
        return {"pixel_values": np.concatenate([medium.features for medium in media])}

    def grid(self, height: int, width: int, max_tokens: int | None = None) -> Grid:
        """The tiles of an image of this size. A limit of tokens lowers `max_patches`. Raises MediaError if one tile has
        more tokens."""
        limit = limit_of(max_tokens)
        allowed = limit // self.tokens_per_tile
        if not allowed:
            raise MediaError(
                f"an image needs at least {counted(self.tokens_per_tile, 'token')}, those of a tile, but may only have "
                f"{counted(limit, 'token')}"
            )
        most = max(1, allowed - self.use_thumbnail)
        lowest, highest = min(self.min_patches, most), min(self.max_patches, most)
        grids = [(columns, rows) for columns in range(1, highest + 1) for rows in range(1, highest // columns + 1)]
        allowed = [grid for grid in sorted(grids, key=math.prod) if math.prod(grid) >= lowest]
        return nearest_grid(height, width, self.size, allowed)


@dataclass(frozen=True, kw_only=True)
class InternVLChatImageProcessor(InternVLImageProcessor):
    """Processor of InternVLChatModel. As its own code does, it reads no file of settings. Sizes and numbers of tiles
    are in config.json, and the statistics are those of ImageNet."""

    needs_settings: ClassVar[bool] = False

    image_mean: tuple[float, ...] = channels((0.485, 0.456, 0.406), -1e6)
    image_std: tuple[float, ...] = channels((0.229, 0.224, 0.225), 1e-6)

    def for_model(self, config: dict[str, Any]) -> Self:
        if not isinstance(config.get("vision_config"), dict):
            return self
        fields = ChatFields.read(config)
        size = fields.force_image_size or read_internvl_vision(config).image_size
        lowest, highest = fields.min_dynamic_patch, fields.max_dynamic_patch
        lowest, highest = (lowest, highest) if fields.dynamic_image_size else (1, 1)
        tiled = replace(self, size=size, min_patches=lowest, max_patches=highest, use_thumbnail=fields.use_thumbnail)
        return super(InternVLChatImageProcessor, tiled).for_model(config)
