"""Images of Gemma 4: `Gemma4ImageProcessor` and `Gemma4UnifiedImageProcessor` of transformers.

An image is resized to the largest size of nearly its shape that has at most `max_soft_tokens` tokens. A token is a
square of `patch_size * pooling_kernel_size` pixels. Tokens for its beginning and its end stand around them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from pace.llm.models.model_config import count, declared, flag
from pace.llm.models.towers.gemma4_unified import Gemma4UnifiedVisionConfig
from pace.llm.models.towers.gemma4_vision import Gemma4VisionConfig
from pace.llm.processors.image_processor import ONLY, WITHOUT_EFFECT, ImageProcessor, backends, channels, limit_of
from pace.llm.processors.settings import check_same
from pace.media.images import image_size, load_rgb, open_source
from pace.media.media import Layout, Media, MediaError, digest_of
from pace.media.patches import level_table, make_pixel_patches, resize

BUDGETS = (70, 140, 280, 560, 1120)
"""Maximum numbers of tokens that the models are trained for."""


def budget(default: int) -> Any:
    def read(value: Any) -> int:
        if type(value) is not int or value not in BUDGETS:
            raise ValueError(f"one of {', '.join(map(str, BUDGETS))}")
        return value

    return declared(default, read)


@dataclass(frozen=True, kw_only=True)
class Gemma4ImageProcessor(ImageProcessor):
    """Processor with the settings of one checkpoint."""

    token: ClassVar[str] = "<|image|>"
    marker: ClassVar[str] = token
    placeholder: ClassVar[str] = token
    only: ClassVar[Mapping[str, tuple]] = ONLY | backends("Gemma4ImageProcessor")
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {"size"}

    patch_size: int = count(16, 512)
    pooling_kernel_size: int = count(3, 64)
    max_soft_tokens: int = budget(280)
    do_normalize: bool = flag(False)
    image_mean: tuple[float, ...] = channels((0.0, 0.0, 0.0), -1e6)
    image_std: tuple[float, ...] = channels((1.0, 1.0, 1.0), 1e-6)
    max_side: int = 10240
    """Maximum number of patches in a row or a column of the grid."""

    def for_model(self, config: dict[str, Any]) -> Self:
        """This processor with the limits of the tower of config.json. Raises ValueError if its patches are others."""
        if not isinstance(config.get("vision_config"), dict):
            return self
        vision = self.read_tower(config["vision_config"])
        for name in ("patch_size", "pooling_kernel_size"):
            check_same(f"vision_config.{name}", getattr(vision, name), getattr(self, name))
        return replace(self, max_side=self.positions_of(vision))

    @staticmethod
    def read_tower(fields: Any) -> Any:
        return Gemma4VisionConfig.read(fields)

    @staticmethod
    def positions_of(vision: Any) -> int:
        return vision.position_embedding_size

    @cached_property
    def table(self) -> np.ndarray:
        """Value of each level of each channel, float32 `[3, 256]`."""
        mean, std = (self.image_mean, self.image_std) if self.do_normalize else ((0.0,) * 3, (1.0,) * 3)
        return level_table(self.rescale_factor, mean, std)

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.patch_size * self.pooling_kernel_size

    @property
    def unit(self) -> int:
        """Side in pixels of a patch that the tower takes."""
        return self.patch_size

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes, resizes and cuts an image, as `MediaProcessor` says. The features are its patches, with values from
        0 to 1; their order is row, column, channel."""
        opened = open_source(source)
        height, width = size = self.target_size(*image_size(opened), max_tokens)
        image = load_rgb(opened)
        pixels = resize(image, *size, self.resample)
        digest = digest_of(repr((self, image.size, size)), image.tobytes())
        return Media(
            kind=self.kind,
            features=make_pixel_patches(pixels, self.table, self.unit),
            grid=(1, height // self.unit, width // self.unit),
            num_tokens=self.tokens_of(size),
            digest=digest,
        )

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        """The text of an image. Only its header is read."""
        num_tokens = self.tokens_of(self.target_size(*image_size(source), max_tokens))
        return Layout(f"<|image>{self.token * num_tokens}<image|>", (num_tokens,))

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """`pixel_values` float32 `[images, P, K]`, and `image_position_ids` int64 `[images, P, 2]`: column and row of
        each patch. Zeros follow the patches of an image, and -1 their positions."""
        limit = self.max_soft_tokens * (self.factor // self.unit) ** 2
        values = np.zeros((len(media), limit, media[0].features.shape[1]), np.float32)
        places = np.full((len(media), limit, 2), -1, np.int64)
        for index, medium in enumerate(media):
            _, rows, columns = medium.grid
            values[index, : rows * columns] = medium.features
            places[index, : rows * columns] = np.indices((rows, columns))[::-1].reshape(2, -1).T
        return {"pixel_values": values, "image_position_ids": places}

    def tokens_of(self, size: tuple[int, int]) -> int:
        return size[0] // self.factor * (size[1] // self.factor)

    def target_size(self, height: int, width: int, max_tokens: int | None = None) -> tuple[int, int]:
        """Height and width after the resize. `max_tokens` chooses the largest of `BUDGETS` that is not above it; below
        all of them, it is the budget itself. Raises MediaError for an image that is too long and thin."""
        limit = min(self.max_soft_tokens, limit_of(max_tokens))
        limit = max((tokens for tokens in BUDGETS if tokens <= limit), default=limit)
        size = fitted(height, width, self.factor, limit)
        if max(size) // self.unit > self.max_side:
            raise MediaError(
                f"an image of {width} x {height} pixels is too long and thin: it has {max(size) // self.unit} patches "
                f"on a side, and the model takes {self.max_side}"
            )
        return size


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedImageProcessor(Gemma4ImageProcessor):
    """The processor of the 12B: a patch is a token."""

    only: ClassVar[Mapping[str, tuple]] = ONLY | backends("Gemma4UnifiedImageProcessor")

    @staticmethod
    def read_tower(fields: Any) -> Any:
        return Gemma4UnifiedVisionConfig.read(fields)

    @staticmethod
    def positions_of(vision: Any) -> int:
        return vision.mm_posemb_size

    @property
    def unit(self) -> int:
        return self.factor


def fitted(height: int, width: int, factor: int, max_tokens: int) -> tuple[int, int]:
    """The largest height and width, multiples of `factor`, with nearly the same shape and at most `max_tokens` squares
    of that side. A side that would be 0 is one square; the other one then has a length of its own. Raises MediaError if
    both would be 0."""
    scale = math.sqrt(max_tokens * factor**2 / (height * width))
    rows, columns = (math.floor(scale * side / factor) for side in (height, width))
    if not rows and not columns:
        raise MediaError(f"an image of {width} x {height} pixels does not fit into {max_tokens} tokens")
    if not rows:
        rows, columns = 1, min(width // height, max_tokens)
    elif not columns:
        rows, columns = min(height // width, max_tokens), 1
    return rows * factor, columns * factor
