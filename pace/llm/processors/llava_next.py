"""Images of LLaVA-NeXT and LLaVA-OneVision: `LlavaNextImageProcessor` and `LlavaOnevisionImageProcessor` of
transformers.

The whole image is stretched to one tile. It is followed by the tiles of the image enlarged to one of several sizes,
with black edges where the shapes differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np

from pace.llm.models.model_config import flag
from pace.llm.models.towers.anyres import (
    LLAVA_16,
    ONEVISION,
    AnyresProjectorConfig,
    Canvas,
    OnevisionProjectorConfig,
    Size,
    pinpoints,
)
from pace.llm.processors.image_processor import ONLY, backends, limit_of
from pace.llm.processors.llava import LlavaImageProcessor, center_crop, sides
from pace.llm.processors.settings import check_same
from pace.media.images import image_size, pillow
from pace.media.media import Layout, Media, MediaError
from pace.media.patches import cut_tiles, normalised, resize
from pace.naming import counted, shown


@dataclass(frozen=True, kw_only=True)
class LlavaNextImageProcessor(LlavaImageProcessor):
    """Processor with the settings of one checkpoint. `num_tokens` are those of a tile."""

    only: ClassVar[Mapping[str, tuple]] = (
        ONLY | backends("LlavaNextImageProcessor") | {"aspect_ratio_setting": ("anyres",)}
    )

    do_pad: bool = flag(True)
    """Without effect: `arrays` are always filled with tiles of zeros."""
    image_grid_pinpoints: tuple[Size, ...] = pinpoints(LLAVA_16)
    """Height and width of enlarged images."""
    max_tiles: int | None = None
    """Tiles whose patches are the most that lines have together; None for no limit."""
    projector: ClassVar[type[AnyresProjectorConfig]] = AnyresProjectorConfig

    @classmethod
    def from_dict(cls, raw: dict[str, Any], file: str = "preprocessor_config.json") -> Self:
        return super(LlavaImageProcessor, cls).from_dict(raw, file)

    def for_model(self, config: dict[str, Any]) -> Self:
        if not isinstance(config.get("vision_config"), dict):
            return self
        projector = self.projector.read(config)
        check_same("image_grid_pinpoints", projector.image_grid_pinpoints, self.image_grid_pinpoints)
        if self.crop_size != self.final_size:
            raise ValueError(
                f"the processor's settings cut tiles of {shown(self.crop_size)} pixels, and resize them to "
                f"{shown(self.final_size)}; a tower takes one size"
            )
        return replace(super().for_model(config), max_tiles=projector.vision_aspect_ratio)

    @property
    def stretched(self) -> Size:
        """Size of the tile of the whole image, before a crop."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def final_size(self) -> Size:
        return self.crop_size if self.do_center_crop else self.stretched

    @property
    def least_tokens(self) -> int:
        """The tokens that suffice for an image of any shape."""
        return min(self.tokens_of(self.canvas_of(*size, [size])) for size in self.image_grid_pinpoints)

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes, enlarges and cuts an image, as `MediaProcessor` says. The features are float32 `[T, 3, S, S]`: the
        pixels of T tiles."""
        image, canvas, digest = self.decode(source, lambda *size: self.canvas(*size, max_tokens))
        side = self.crop_size[0]
        tiles = [resize(image, *self.stretched, self.resample)]
        tiles += list(cut_tiles(self._enlarged(image, canvas.rows * side, canvas.columns * side), side))
        return Media(
            kind=self.kind,
            features=normalised(np.stack([self._finished(tile) for tile in tiles]), self.table),
            grid=(canvas.num_tiles, self.patches_per_side, self.patches_per_side),
            num_tokens=self.tokens_of(canvas),
            digest=digest,
            canvas=tuple(canvas),
        )

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        """The placeholders of an image. Only its header is read."""
        num_tokens = self.tokens_of(self.canvas(*image_size(source), max_tokens))
        return Layout(self.token * num_tokens, (num_tokens,))

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """`pixel_values` float32 `[images, T, 3, S, S]` with tiles of zeros after those of an image, and `image_sizes`
        int64 `[images, 2]`, before they are enlarged."""
        pixels = np.zeros(
            (len(media), max(len(one.features) for one in media), *media[0].features.shape[1:]), np.float32
        )
        for filled, medium in zip(pixels, media):
            filled[: len(medium.features)] = medium.features
        sizes = [medium.canvas[2:] for medium in media if medium.canvas is not None]
        return {"pixel_values": pixels, "image_sizes": np.array(sizes, np.int64)}

    def canvas(self, height: int, width: int, max_tokens: int | None = None) -> Canvas:
        """The tiles of an image of this size. A limit of tokens leaves the sizes with fewer tokens. Raises MediaError
        if there is none."""
        limit, sizes = limit_of(max_tokens), self.image_grid_pinpoints
        counts = [self.tokens_of(self.canvas_of(height, width, [size])) for size in sizes]
        allowed = [size for size, count in zip(sizes, counts) if count <= limit]
        if not allowed:
            raise MediaError(
                f"an image of {width} x {height} pixels needs at least {counted(min(counts), 'token')} in this model, "
                f"but may only have {counted(limit, 'token')}"
            )
        return self.canvas_of(height, width, allowed)

    def canvas_of(self, height: int, width: int, sizes: Sequence[Size]) -> Canvas:
        """The tiles of an image of this size, enlarged to one of `sizes`."""
        return Canvas.of(height, width, sizes, self.crop_size[0])

    def tokens_of(self, canvas: Canvas) -> int:
        return canvas.num_tokens(self.patches_per_side, self.max_tiles)

    def _enlarged(self, image: Any, height: int, width: int) -> np.ndarray:
        """Pixels uint8 `[height, width, 3]` of an image in the middle of black edges."""
        wide, high = width / image.width, height / image.height
        rows, columns = height, width
        if wide < high:
            rows = min(math.ceil(image.height * wide), height)
        else:
            columns = min(math.ceil(image.width * high), width)
        pixels = np.zeros((height, width, 3), np.uint8)
        top, left = (height - rows) // 2, (width - columns) // 2
        pixels[top : top + rows, left : left + columns] = resize(image, rows, columns, self.resample)
        return pixels

    def _finished(self, tile: np.ndarray) -> np.ndarray:
        """A tile with the size that the tower takes."""
        size = self._resized(*tile.shape[:2])
        if size != tile.shape[:2]:
            tile = resize(pillow().fromarray(tile), *size, self.resample)
        return center_crop(tile, *self.crop_size) if self.do_center_crop else tile


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionImageProcessor(LlavaNextImageProcessor):
    """Processor of LLaVA-OneVision. The only image of a prompt has tiles. Each of several is a square with edges in the
    mean color, and has one tile, as in a conversation of transformers."""

    only: ClassVar[Mapping[str, tuple]] = ONLY | backends("LlavaOnevisionImageProcessor")

    size: int | Size = sides(384)
    do_center_crop: bool = flag(False)
    crop_size: Size = sides(384)
    image_grid_pinpoints: tuple[Size, ...] = pinpoints(ONEVISION)
    projector: ClassVar[type[AnyresProjectorConfig]] = OnevisionProjectorConfig

    @classmethod
    def from_dict(cls, raw: dict[str, Any], file: str = "preprocessor_config.json") -> Self:
        made = super().from_dict(raw, file)
        return made if raw.get("crop_size") is not None else replace(made, crop_size=made.stretched)

    def among(self, num_images: int) -> LlavaImageProcessor:
        if num_images == 1:
            return self
        shared = {field.name: getattr(self, field.name) for field in fields(LlavaImageProcessor)}
        # The tower adds a row after those of the tile.
        return LlavaImageProcessor(**shared | {"do_pad": True, "num_tokens": self.num_tokens + 1})

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """The arrays of LLaVA-NeXT for images of a prompt each, and ones: `batch_num_images` int64 `[images]`."""
        return super().arrays(media) | {"batch_num_images": np.ones(len(media), np.int64)}
