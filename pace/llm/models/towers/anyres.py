"""Images of any size in LLaVA-NeXT and LLaVA-OneVision: a tile of the whole image, and then tiles of an enlarged image
with edges.

The towers are those of LLaVA. Rows of edges are left out, and a learned row follows each line of patches. Source:
`modeling_llava_next.py` and `modeling_llava_onevision.py` of transformers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from pace.llm.layers import Vectors
from pace.llm.models.model_config import choice, declared
from pace.llm.models.towers.clip import ClipVisionConfig, LlavaClipTower, LlavaTower, num_llava_tokens
from pace.llm.models.towers.projector import ProjectorConfig, feature_layers
from pace.llm.models.towers.siglip import SiglipVisionConfig
from pace.llm.models.towers.tower import RunSlice, read_arrays
from pace.media.media import Media, digest_of
from pace.naming import shown

MAX_SIDE = 2**14
"""Maximum side of an enlarged image in pixels. Published are up to 3840."""
MAX_PINPOINTS = 2**8
MAX_EXCESS = 1.1
"""Lines that are at most this factor too long, compared with those of `max_tiles`, stay as they are."""

Size = tuple[int, int]
"""Height and width in pixels."""


LLAVA_16 = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
ONEVISION = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
"""Default sizes of enlarged images."""


def pinpoints(default: tuple[Size, ...]) -> Any:
    """Sizes of enlarged images; null for the default."""

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
        """The tiles of `side` pixels for an image of this size, enlarged to one of `sizes`. It is the size that shows
        most of its pixels, and of equal ones the size with the smallest edges."""
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

    def shown(self, side: int, max_tiles: int | None) -> tuple[int, int]:
        """Rows and columns for the text model: those of `inner`, or fewer if they are more than `max_tiles` have."""
        rows, columns = self.inner(side)
        ratio = 0.0 if max_tiles is None else math.sqrt(rows * columns / (max_tiles * side**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > MAX_EXCESS else (rows, columns)

    def num_tokens(self, side: int, max_tiles: int | None) -> int:
        """Rows for the text model: those of the whole image, and those of lines and their ends."""
        rows, columns = self.shown(side, max_tiles)
        return side * side + rows * (columns + 1)


@dataclass(frozen=True, kw_only=True)
class AnyresProjectorConfig(ProjectorConfig):
    """Fields of LLaVA-NeXT."""

    image_grid_pinpoints: tuple[Size, ...] = pinpoints(LLAVA_16)
    vision_aspect_ratio: int | None = None
    """Tiles whose patches are the most that lines have together. Lines of more are resized; None for never."""

    def between(self, vision: SiglipVisionConfig, text: Any) -> Self:
        """These fields with those of the text's config. Raises NotImplementedError if tiles do not fill the enlarged
        images, or rows of patches do not fill a tile."""
        side = vision.image_size
        for size in self.image_grid_pinpoints:
            if size[0] % side or size[1] % side:
                raise NotImplementedError(
                    f"config.json: image_grid_pinpoints with {list(size)} is not implemented; implemented: multiples "
                    f"of vision_config.image_size = {side}"
                )
        config = super().between(vision, text)
        if num_llava_tokens(vision, config) != vision.patches_per_side**2:
            only = "default" if isinstance(vision, ClipVisionConfig) else "full"
            raise NotImplementedError(
                f"config.json: vision_feature_select_strategy = {shown(config.vision_feature_select_strategy)} is not "
                f"implemented for tiles of this tower; implemented: {only}"
            )
        return config


def anyres_max() -> Any:
    """The number of tiles in "anyres_max_9"."""

    def read(value: Any) -> int:
        found = re.fullmatch(r"anyres_max_([1-9]\d{0,2})", value) if isinstance(value, str) else None
        if found is None:
            raise ValueError("anyres_max_ and a number, such as anyres_max_9")
        return int(found[1])

    return declared(9, read)


@dataclass(frozen=True, kw_only=True)
class OnevisionProjectorConfig(AnyresProjectorConfig):
    """Fields of LLaVA-OneVision."""

    vision_feature_select_strategy: str = choice("full", ("default", "full"))
    vision_feature_layer: tuple[int, ...] = feature_layers(-1)
    image_grid_pinpoints: tuple[Size, ...] = pinpoints(ONEVISION)
    vision_aspect_ratio: int | None = anyres_max()


class AnyresTower(LlavaTower):
    """Media have the pixels of their tiles, float32 `[T, C, S, S]`: first that of the whole image, and then those of
    the enlarged one, row by row."""

    input_names: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")
    projector: AnyresProjectorConfig

    def __init__(self, config: SiglipVisionConfig, projector: AnyresProjectorConfig, placeholder: int):
        super().__init__(config, projector, placeholder)
        self.newline = Vectors({"vision_tower.image_newline": self.width})

    def encode(self, media: Media, run: RunSlice) -> Generator[None, None, Tensor]:
        side = self.config.patches_per_side
        tiles = dataclasses.replace(media, num_tokens=media.grid[0] * side * side, canvas=None, runs=())
        x = yield from super().encode(tiles, run)
        if media.canvas is None:
            return torch.cat([x, self.newline.values[None]])
        canvas, whole, x = Canvas(*media.canvas), x[: side * side], x[side * side :]
        grid = x.view(canvas.rows, canvas.columns, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        rows, columns = canvas.inner(side)
        top, left = (len(grid) - rows) // 2, (grid.shape[1] - columns) // 2
        lines = grid[top : top + rows, left : left + columns]
        shown = canvas.shown(side, self.projector.vision_aspect_ratio)
        if shown != (rows, columns):
            resized = functional.interpolate(lines.permute(2, 0, 1)[None], shown, mode="bilinear")
            lines = resized[0].permute(1, 2, 0)
        ends = self.newline.values.expand(shown[0], 1, -1)
        return torch.cat([whole, torch.cat([lines, ends], 1).flatten(0, 1)])

    # -- inputs

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        config, (pixels, sizes) = self.config, read_arrays(inputs, self.kind, ("pixel_values", "image_sizes"))
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
        tiled = zip(pixels.detach().float().cpu().contiguous(), sizes.tolist(), self.are_whole(inputs, len(pixels)))
        return [self._whole(tiles) if is_whole else self._of_tiles(tiles, *size) for tiles, size, is_whole in tiled]

    def are_whole(self, inputs: Mapping[str, Any], num_images: int) -> list[bool]:
        """True for images of any size that have one tile. Raises ValueError for arrays that do not fit."""
        return [False] * num_images

    def blank(self, num_tokens: int) -> Media:
        """An image that fills one of the sizes."""
        config, side = self.config, self.config.patches_per_side
        filled = [Canvas.of(*size, [size], config.image_size) for size in self.projector.image_grid_pinpoints]
        count = partial(Canvas.num_tokens, side=side, max_tiles=self.projector.vision_aspect_ratio)
        small = [canvas for canvas in filled if count(canvas) <= num_tokens]
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
        num_tokens = canvas.num_tokens(side, self.projector.vision_aspect_ratio)
        return Media("image", features, (canvas.num_tiles, side, side), num_tokens, digest, canvas=tuple(canvas))

    def _whole(self, tiles: Tensor) -> Media:
        """The medium of an image that is the first of `tiles [T, C, S, S]`."""
        side, features = self.config.patches_per_side, tiles[:1].numpy()
        digest = digest_of(f"tile {features.shape} ", features)
        return Media("image", features, (1, side, side), side * side + 1, digest)


class AnyresClipTower(AnyresTower, LlavaClipTower):
    """The same with CLIP."""


class OnevisionTower(AnyresTower):
    """The same in LLaVA-OneVision."""

    input_names: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes", "batch_num_images")

    def are_whole(self, inputs: Mapping[str, Any], num_images: int) -> list[bool]:
        """True for images of a prompt with several, if `batch_num_images` has the number of each prompt."""
        counts = inputs.get("batch_num_images")
        counts = [1] * num_images if counts is None else torch.as_tensor(counts).tolist()
        if not all(type(count) is int and count >= 0 for count in counts) or sum(counts) != num_images:
            raise ValueError(f"batch_num_images must be counts with the sum {num_images}; got {shown(counts)}")
        return [count > 1 for count in counts for _ in range(count)]
