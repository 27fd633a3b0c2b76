"""Images of Idefics3 and SmolVLM: `Idefics3ImageProcessor` of transformers, and the text that shows them in a prompt.

An image is enlarged or shrunk until its longest edge is `size`, and stretched to whole tiles of `max_image_size`. The
tiles are followed by the whole image, shrunk to one tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pace.llm.models.model_config import count, declared, flag
from pace.llm.models.towers.idefics3 import Idefics3VisionConfig
from pace.llm.processors.image_processor import ONLY, WITHOUT_EFFECT, ImageProcessor, backends, limit_of
from pace.media.images import image_size
from pace.media.media import Layout, Media, MediaError
from pace.media.patches import cut_tiles, normalised, resize
from pace.naming import counted

MAX_EDGE = 4096
"""Longest edge of an enlarged image, as in transformers."""

Size = tuple[int, int]
"""Height and width in pixels."""


def longest_edge(default: int) -> Any:
    """An object with the length of the longest edge."""

    def read(value: Any) -> int:
        edge = value.get("longest_edge") if isinstance(value, dict) and len(value) == 1 else None
        if type(edge) is not int or not 1 <= edge <= MAX_EDGE:
            raise ValueError(f"an object with longest_edge, an integer in 1..{MAX_EDGE}")
        return edge

    return declared(default, read)


class Tiling(NamedTuple):
    """How an image is cut."""

    sizes: tuple[Size, Size]
    """Sizes of the image after its first and its second resize."""
    rows: int
    """Rows of tiles; 0 if the image is one tile."""
    columns: int

    @property
    def num_tiles(self) -> int:
        """Number of tiles, that of the whole image included."""
        return self.rows * self.columns + 1


@dataclass(frozen=True, kw_only=True)
class Idefics3ImageProcessor(ImageProcessor):
    """Processor with the settings of one checkpoint. `for_model` adds the number of tokens of a tile."""

    token: ClassVar[str] = "<image>"
    marker: ClassVar[str] = token
    placeholder: ClassVar[str] = token
    only: ClassVar[Mapping[str, tuple]] = (
        ONLY | backends("Idefics3ImageProcessor", "SmolVLMImageProcessor") | {"do_pad": (True,)}
    )
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {"return_row_col_info", "video_sampling"}

    resample: int = count(1, 5, 0)
    size: int = longest_edge(4 * 364)
    max_image_size: int = longest_edge(364)
    """Side of a tile in pixels."""
    do_image_splitting: bool = flag(True)
    """False if every image is one tile."""
    image_seq_len: int = 169
    """Tokens of a tile."""
    tile_patches: int = 26
    """Patches on a side of a tile."""

    def for_model(self, config: dict[str, Any]) -> Idefics3ImageProcessor:
        """Returns this processor with the tokens and patches of a tile. Raises ValueError for tiles that the tower of
        config.json cannot take."""
        if not isinstance(config.get("vision_config"), dict):
            return self
        vision = Idefics3VisionConfig.of(config)
        patches = self.max_image_size // vision.patch_size
        if not patches or patches % vision.scale_factor:
            raise ValueError(
                f"max_image_size.longest_edge = {self.max_image_size} has {patches} patches of {vision.patch_size} "
                f"pixels; the tower needs a multiple of scale_factor, {vision.scale_factor}"
            )
        return replace(self, image_seq_len=(patches // vision.scale_factor) ** 2, tile_patches=patches)

    @property
    def least_tokens(self) -> int:
        return self.image_seq_len

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes, resizes and cuts an image, as `MediaProcessor` says. The features are float32 `[T, 3, S, S]`: the
        pixels of T tiles."""
        image, tiling, digest = self.decode(source, lambda *size: self.tiling(*size, max_tokens))
        tile = self.max_image_size
        for height, width in tiling.sizes:
            image = image.resize((width, height), self.resample)
        levels = resize(image, tile, tile, self.resample)[None]
        if tiling.rows:
            levels = np.concatenate([cut_tiles(np.asarray(image), tile), levels])
        return Media(
            kind=self.kind,
            features=normalised(levels, self.table),
            grid=(tiling.num_tiles, self.tile_patches, self.tile_patches),
            num_tokens=tiling.num_tiles * self.image_seq_len,
            digest=digest,
            runs=(self.image_seq_len,) * tiling.num_tiles,
        )

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        """The rows of tiles with a line break after each, a line break, and the whole image."""
        _, rows, columns = tiling = self.tiling(*image_size(source), max_tokens)
        tile = self.token * self.image_seq_len
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"<fake_token_around_image><row_{row}_col_{column}>{tile}"
            text += "\n"
        text += "\n" * (rows > 0) + f"<fake_token_around_image><global-img>{tile}<fake_token_around_image>"
        return Layout(text, (self.image_seq_len,) * tiling.num_tiles)

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """The images of one prompt: `pixel_values` float32 `[1, sum of T, 3, S, S]` and ones, `pixel_attention_mask`
        int64 `[1, sum of T, S, S]`."""
        pixels = np.concatenate([medium.features for medium in media])[None]
        return {
            "pixel_values": pixels,
            "pixel_attention_mask": np.ones((*pixels.shape[:2], *pixels.shape[3:]), np.int64),
        }

    def tiling(self, height: int, width: int, max_tokens: int | None = None) -> Tiling:
        """The tiles of an image of this size. A limit of tokens lowers `size`, tile by tile. Raises MediaError if one
        tile has more tokens."""
        limit, tile = limit_of(max_tokens), self.max_image_size
        for edge in (self.size, *range((self.size - 1) // tile * tile, 0, -tile)):
            tiling = self._tiling(height, width, edge)
            if tiling.num_tiles * self.image_seq_len <= limit:
                return tiling
        raise MediaError(
            f"an image needs at least {counted(self.image_seq_len, 'token')}, those of a tile, but may only have "
            f"{counted(limit, 'token')}"
        )

    def _tiling(self, height: int, width: int, edge: int) -> Tiling:
        tile, first = self.max_image_size, with_longest_edge(height, width, edge)
        if not self.do_image_splitting:
            return Tiling((first, (tile, tile)), 0, 0)
        second = whole_tiles(*first, tile)
        rows, columns = second[0] // tile, second[1] // tile
        return Tiling((first, second), rows, columns) if rows * columns > 1 else Tiling((first, second), 0, 0)


def with_longest_edge(height: int, width: int, edge: int) -> Size:
    """The size whose longest edge is `edge`, with nearly the same aspect ratio. The other edge is even."""
    aspect = width / height
    if width >= height:
        other = int(edge / aspect)
        return max(other + other % 2, 1), edge
    other = int(edge * aspect)
    return edge, max(other + other % 2, 1)


def whole_tiles(height: int, width: int, tile: int) -> Size:
    """Multiples of `tile`: the longest edge is rounded up, and then the other one for the same aspect ratio."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return math.ceil(int(width / aspect) / tile) * tile, width
    height = math.ceil(height / tile) * tile
    return height, math.ceil(int(height * aspect) / tile) * tile
