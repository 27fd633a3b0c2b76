"""Images of any size in LLaVA-NeXT: a tile of the whole image, and then tiles of an enlarged image with edges.

The towers are those of LLaVA. Rows of edges are left out, and a learned row follows each line of patches. Source:
`modeling_llava_next.py` and `processing_llava_next.py` of transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from pace.llm.layers import Vectors
from pace.llm.models.model_config import declared
from pace.llm.models.towers.clip import ClipVisionConfig, LlavaClipTower, LlavaTower, num_llava_tokens
from pace.llm.models.towers.projector import ProjectorConfig
from pace.llm.models.towers.siglip import SiglipVisionConfig
from pace.llm.models.towers.tower import RunSlice
from pace.media.media import Media, digest_of
from pace.naming import shown

MAX_SIDE = 2**14
"""Maximum side of an enlarged image in pixels. Published are up to 3840."""
MAX_PINPOINTS = 2**8

Size = tuple[int, int]
"""Height and width in pixels."""


def pinpoints() -> Any:
    """Sizes of enlarged images; null for those of LLaVA 1.6."""
    default = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))

    def read(value: Any) -> tuple[Size, ...]:
        if value is None:
            return default
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_PINPOINTS or not all(map(is_size, value)):
            raise ValueError(f"a list of 1..{MAX_PINPOINTS} sizes [height, width], integers in 1..{MAX_SIDE}")
        return tuple((height, width) for height, width in value)

    return declared(default, read)


def is_size(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(type(side) is int and 1 <= side <= MAX_SIDE for side in value)


class Canvas(NamedTuple):
    """The tiles of one enlarged image."""

    rows: int
    columns: int
    height: int
    width: int
    """Size of the image before it is enlarged."""

    @classmethod
    def of(cls, height: int, width: int, sizes: Iterable[Size], side: int) -> Canvas:
        """The tiles of `side` pixels for an image of this size, enlarged to one of `sizes`: that which shows most of
        its pixels, and of equal ones that with the smallest edges."""
        best, most, least = (0, 0), 0, math.inf
        for size in sizes:
            scale = min(size[1] / width, size[0] / height)
            seen = min(int(width * scale) * int(height * scale), height * width)
            wasted = size[0] * size[1] - seen
            if seen > most or (seen == most and wasted < least):
                best, most, least = size, seen, wasted
        return cls(best[0] // side, best[1] // side, height, width)

    @property
    def num_tiles(self) -> int:
        """Number of tiles, that of the whole image included."""
        return 1 + self.rows * self.columns

    def inner(self, side: int) -> tuple[int, int]:
        """Rows and columns of patches without edges, which are the same on both sides. A tile has side x side."""
        rows, columns = self.rows * side, self.columns * side
        if self.width / self.height > columns / rows:
            return rows - (rows - int(round(self.height * (columns / self.width), 7))) // 2 * 2, columns
        return rows, columns - (columns - int(round(self.width * (rows / self.height), 7))) // 2 * 2

    def num_tokens(self, side: int) -> int:
        """Rows for the text model: those of the whole image, and those of patches and ends of lines."""
        rows, columns = self.inner(side)
        return side * side + rows * (columns + 1)


@dataclass(frozen=True, kw_only=True)
class AnyresProjectorConfig(ProjectorConfig):
    """Fields of LLaVA-NeXT."""

    image_grid_pinpoints: tuple[Size, ...] = pinpoints()

    def between(self, vision: SiglipVisionConfig, text: Any) -> Self:
        """These fields with those of the text's config. Raises NotImplementedError if tiles do not fill the enlarged
        images, or rows of patches do not fill a tile."""
        side = vision.image_size
        for size in self.image_grid_pinpoints:
            if size[0] % side or size[1] % side:
                raise NotImplementedError(
                    f"config.json: image_grid_pinpoints with {list(size)} is not implemented; implemented: multiples of "
                    f"vision_config.image_size = {side}"
                )
        config = super().between(vision, text)
        if num_llava_tokens(vision, config) != vision.patches_per_side**2:
            only = "default" if isinstance(vision, ClipVisionConfig) else "full"
            raise NotImplementedError(
                f"config.json: vision_feature_select_strategy = {shown(config.vision_feature_select_strategy)} is not "
                f"implemented for LlavaNext with this tower; implemented: {only}"
            )
        return config


class AnyresTower(LlavaTower):
    """Media have the pixels of their tiles, float32 `[T, C, S, S]`: first that of the whole image, and then those of
    the enlarged one, row by row."""

    input_names: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")
    projector: AnyresProjectorConfig

    def __init__(self, config: SiglipVisionConfig, projector: AnyresProjectorConfig, placeholder: int):
        super().__init__(config, projector, placeholder)
        self.newline = Vectors({"vision_tower.image_newline": self.width})

    def encode(self, media: Media, run: RunSlice) -> Generator[None, None, Tensor]:
        assert media.canvas is not None
        canvas, side = Canvas(*media.canvas), self.config.patches_per_side
        tiles = dataclasses.replace(media, num_tokens=canvas.num_tiles * side * side, canvas=None, runs=())
        x = yield from super().encode(tiles, run)
        whole, x = x[: side * side], x[side * side :]
        grid = x.view(canvas.rows, canvas.columns, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        rows, columns = canvas.inner(side)
        top, left = (len(grid) - rows) // 2, (grid.shape[1] - columns) // 2
        newline = self.newline.values.expand(rows, 1, -1)
        lines = torch.cat([grid[top : top + rows, left : left + columns], newline], 1)
        return torch.cat([whole, lines.flatten(0, 1)])

    # -- inputs

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        config, (pixels, sizes) = self.config, self.arrays_of(inputs)
        shape = config.num_channels, config.image_size, config.image_size
        if not pixels.is_floating_point() or pixels.ndim != 5 or pixels.shape[2:] != shape:
            raise ValueError(
                f"pixel_values must be floats [images, tiles, {', '.join(map(str, shape))}]; got {pixels.dtype} "
                f"{list(pixels.shape)}"
            )
        if sizes.is_floating_point() or sizes.shape != (len(pixels), 2) or (sizes < 1).any():
            raise ValueError(
                f"image_sizes must be integers [{len(pixels)}, 2] from 1 on; got {sizes.dtype} {list(sizes.shape)}"
            )
        return [
            self._of_tiles(tiles, *size)
            for tiles, size in zip(pixels.detach().float().cpu().contiguous(), sizes.tolist())
        ]

    def blank(self, num_tokens: int) -> Media:
        """An image that fills one of the sizes."""
        config, side = self.config, self.config.patches_per_side
        filled = [Canvas.of(*size, [size], config.image_size) for size in self.projector.image_grid_pinpoints]
        small = [canvas for canvas in filled if canvas.num_tokens(side) <= num_tokens]
        count = lambda canvas: canvas.num_tokens(side)  # noqa: E731
        canvas = max(small, key=count) if small else min(filled, key=count)
        tiles = torch.zeros(canvas.num_tiles, config.num_channels, config.image_size, config.image_size)
        return self._of_tiles(tiles, canvas.height, canvas.width)

    def _of_tiles(self, tiles: Tensor, height: int, width: int) -> Media:
        """The medium of an image of this size: the first of `tiles [T, C, S, S]`. Others fill an array."""
        canvas = Canvas.of(height, width, self.projector.image_grid_pinpoints, self.config.image_size)
        if len(tiles) < canvas.num_tiles:
            raise ValueError(
                f"an image of {width} x {height} pixels has {canvas.num_tiles} tiles; pixel_values has {len(tiles)}"
            )
        side, features = self.config.patches_per_side, tiles[: canvas.num_tiles].numpy()
        digest = digest_of(f"tiles {tuple(canvas)} {features.shape} ", features)
        grid = canvas.num_tiles, side, side
        return Media("image", features, grid, canvas.num_tokens(side), digest, canvas=tuple(canvas))


class AnyresClipTower(AnyresTower, LlavaClipTower):
    """The same with CLIP."""
