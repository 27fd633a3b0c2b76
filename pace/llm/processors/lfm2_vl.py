"""Images of LFM2-VL: `Lfm2VlImageProcessor` of transformers, and the text that shows them in a prompt.

A large image is cut into tiles, which a thumbnail of it may follow. Others are one tile of their own shape.
transformers resizes with torchvision; Pillow's values, used here, differ by at most two levels of 255."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pace.llm.models.model_config import count, flag, number
from pace.llm.processors.image_processor import ONLY, WITHOUT_EFFECT, ImageProcessor, backends, limit_of, nearest_grid
from pace.llm.processors.settings import check_same
from pace.media.images import image_size
from pace.media.media import Layout, Media, MediaError
from pace.media.patches import cut_tiles, make_pixel_patches, resize
from pace.naming import counted

MAX_TILES = 64
"""Upper bound of `max_tiles`; checkpoints have 10."""

Size = tuple[int, int]
"""Height and width in pixels."""


class Tiling(NamedTuple):
    """How an image is cut."""

    rows: int
    """Rows of tiles; 0 if the whole image is one tile."""
    columns: int
    whole: Size | None
    """Size of the whole image, alone or as the thumbnail after the tiles; None without a thumbnail."""


@dataclass(frozen=True, kw_only=True)
class Lfm2VlImageProcessor(ImageProcessor):
    """Processor with the settings of one checkpoint."""

    token: ClassVar[str] = "<image>"
    marker: ClassVar[str] = token
    placeholder: ClassVar[str] = token
    only: ClassVar[Mapping[str, tuple]] = ONLY | backends("Lfm2VlImageProcessor") | {"do_pad": (True,)}
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {
        "do_resize",
        "max_num_patches",
        "return_row_col_info",
        "size",
    }
    """transformers ignores `do_resize` and `size`, too."""

    resample: int = count(2, 5, 0)
    downsample_factor: int = count(2, 16)
    """Side of the square of patches that becomes one token."""
    do_image_splitting: bool = flag(True)
    """False if every image is one tile of its own shape."""
    min_tiles: int = count(2, MAX_TILES)
    max_tiles: int = count(10, MAX_TILES)
    use_thumbnail: bool = flag(True)
    min_image_tokens: int = count(64, 1 << 16)
    max_image_tokens: int = count(256, 1 << 16)
    """Bounds of the tokens of an image that is one tile, and of the thumbnail."""
    encoder_patch_size: int = count(16, 256)
    tile_size: int = count(512, 4096)
    """Side of a tile in pixels."""
    max_pixels_tolerance: float = number(2.0, 0.0, 1e6)
    """An image is cut if it has more pixels than this times those of `max_image_tokens`."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any], file: str = "preprocessor_config.json") -> Lfm2VlImageProcessor:
        processor = super().from_dict(raw, file)
        for low, high in (("min_tiles", "max_tiles"), ("min_image_tokens", "max_image_tokens")):
            if getattr(processor, low) > getattr(processor, high):
                raise ValueError(
                    f"{file}: {low} must not exceed {high}; got {getattr(processor, low)} and "
                    f"{getattr(processor, high)}"
                )
        if processor.tile_size % processor.factor:
            raise ValueError(
                f"{file}: tile_size must be a multiple of encoder_patch_size * downsample_factor, {processor.factor}; "
                f"got {processor.tile_size}"
            )
        return processor

    def for_model(self, config: dict[str, Any]) -> Lfm2VlImageProcessor:
        """Returns this processor. Raises ValueError if the patches are not those of the tower of config.json."""
        vision = config.get("vision_config")
        if not isinstance(vision, dict):
            return self
        for name, found, own in (
            ("vision_config.patch_size", vision.get("patch_size", 16), self.encoder_patch_size),
            ("downsample_factor", config.get("downsample_factor", 2), self.downsample_factor),
        ):
            check_same(name, found, own)
        return self

    @cached_property
    def table(self) -> np.ndarray:
        """Means and deviations are scaled to levels first, like in the torchvision backend of transformers."""
        scale = np.float32(1 / self.rescale_factor)
        means, stds = (np.array(values, np.float32)[:, None] * scale for values in (self.image_mean, self.image_std))
        return (np.arange(256, dtype=np.float32) - means) / stds

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.encoder_patch_size * self.downsample_factor

    @property
    def tile_tokens(self) -> int:
        return self.tokens_of((self.tile_size, self.tile_size))

    @property
    def max_num_patches(self) -> int:
        """Patches to which the arrays of a tile are filled with zeros."""
        of_tile = (self.tile_size // self.encoder_patch_size) ** 2 if self.do_image_splitting else 0
        return max(self.max_image_tokens * self.downsample_factor**2, of_tile)

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes, resizes and cuts an image, as `MediaProcessor` says."""
        image, tiling, digest = self.decode(source, lambda *size: self.tiling(*size, max_tokens))
        (rows, columns, whole), tile, patch = tiling, self.tile_size, self.encoder_patch_size
        patches, grid, thumbnail = [], None, None
        if rows:
            tiles = cut_tiles(resize(image, rows * tile, columns * tile, self.resample), tile)
            patches += [make_pixel_patches(one, self.table, patch) for one in tiles]
            grid = len(tiles), tile // patch, tile // patch
        if whole is not None:
            patches.append(make_pixel_patches(resize(image, *whole, self.resample), self.table, patch))
            thumbnail = whole[0] // patch, whole[1] // patch
            if grid is None:
                grid, thumbnail = (1, *thumbnail), None
        runs = self.runs(tiling)
        return Media(
            kind=self.kind,
            features=np.concatenate(patches),
            grid=grid,
            num_tokens=sum(runs),
            digest=digest,
            runs=runs,
            thumbnail=thumbnail,
        )

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        """The tiles with their places, and the thumbnail."""
        rows, columns, whole = tiling = self.tiling(*image_size(source), max_tokens)
        text = "<|image_start|>"
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"<|img_row_{row}_col_{column}|>" + self.token * self.tile_tokens
        if whole is not None:
            text += "<|img_thumbnail|>" * (rows > 0) + self.token * self.tokens_of(whole)
        return Layout(text + "<|image_end|>", self.runs(tiling))

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """The patches of all T tiles, filled with zeros to P: `pixel_values` float32 `[T, P, K]`. Ones for patches:
        `pixel_attention_mask` int32 `[T, P]`. Rows and columns: `spatial_shapes` int64 `[T, 2]`."""
        shapes = [shape for medium in media for shape in shapes_of(medium)]
        counts = [rows * columns for rows, columns in shapes]
        patches = np.concatenate([medium.features for medium in media])
        pixels = np.zeros((len(shapes), self.max_num_patches, patches.shape[1]), np.float32)
        mask = np.zeros(pixels.shape[:2], np.int32)
        for index, part in enumerate(np.split(patches, np.cumsum(counts)[:-1])):
            pixels[index, : len(part)] = part
            mask[index, : len(part)] = 1
        return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": np.array(shapes, np.int64)}

    # -- sizes

    def tokens_of(self, size: Size) -> int:
        return size[0] // self.factor * (size[1] // self.factor)

    def runs(self, tiling: Tiling) -> tuple[int, ...]:
        """Tokens of each tile, and of the whole image."""
        tiles = (self.tile_tokens,) * (tiling.rows * tiling.columns)
        return tiles if tiling.whole is None else (*tiles, self.tokens_of(tiling.whole))

    def tiling(self, height: int, width: int, max_tokens: int | None = None) -> Tiling:
        """How an image of this size is cut. A limit of tokens lowers `max_tiles`, and then `max_image_tokens`. Raises
        MediaError for an image that is too long and thin for its number of tokens."""
        limit = limit_of(max_tokens)
        for tiling in self._tilings(height, width, limit):
            if sum(self.runs(tiling)) <= limit:
                break
        else:
            raise MediaError(
                f"an image of {width} x {height} pixels has more than {counted(limit, 'token')}; cut it to a "
                "shape nearer to a square"
            )
        if tiling.whole is not None and math.prod(tiling.whole) > self.max_num_patches * self.encoder_patch_size**2:
            raise MediaError(f"the image is too long and thin: {width} x {height} pixels")
        return tiling

    def _tilings(self, height: int, width: int, limit: int) -> Iterator[Tiling]:
        """Yields the checkpoint's own choice, and then those with fewer tokens."""
        most = self.max_image_tokens
        whole = self.whole_size(height, width, most)
        if self.do_image_splitting and self.max_tiles > 1 and self._is_large(height, width):
            for max_tiles in range(self.max_tiles, self.min_tiles - 1, -1):
                columns, rows = nearest_grid(height, width, self.tile_size, all_grids(self.min_tiles, max_tiles))
                if rows * columns > 1:
                    yield Tiling(rows, columns, whole if self.use_thumbnail else None)
        yield Tiling(0, 0, whole)
        if limit < most:
            yield Tiling(0, 0, self.whole_size(height, width, limit))

    def _is_large(self, height: int, width: int) -> bool:
        sides = [max(self.encoder_patch_size, round(side / self.factor) * self.factor) for side in (height, width)]
        return sides[0] * sides[1] > self.max_image_tokens * self.factor**2 * self.max_pixels_tolerance

    def whole_size(self, height: int, width: int, max_tokens: int) -> Size:
        """Multiples of `factor` near height and width, with an area within the bounds of tokens and the aspect ratio
        nearly kept. Half a factor is rounded to even."""
        factor, most = self.factor, max_tokens * self.factor**2
        least = min(self.min_image_tokens, max_tokens) * factor**2
        sides = [max(factor, round(side / factor) * factor) for side in (height, width)]
        if sides[0] * sides[1] > most:
            shrink = math.sqrt(height * width / most)
            sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
        elif sides[0] * sides[1] < least:
            grow = math.sqrt(least / (height * width))
            sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
        return sides[0], sides[1]


@lru_cache
def all_grids(min_tiles: int, max_tiles: int) -> list[tuple[int, int]]:
    """Columns and rows of all grids with a number of tiles in these bounds, fewer tiles first. Grids with the same
    number have the order of a set, like in transformers: it decides between equally good ones."""
    grids = {
        (columns, rows)
        for most in range(min_tiles, max_tiles + 1)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if min_tiles <= columns * rows <= max_tiles
    }
    return sorted(grids, key=math.prod)


def shapes_of(media: Media) -> list[tuple[int, int]]:
    """Rows and columns of patches of each tile."""
    tiles, rows, columns = media.grid or (0, 0, 0)
    return [(rows, columns)] * tiles + ([] if media.thumbnail is None else [media.thumbnail])
