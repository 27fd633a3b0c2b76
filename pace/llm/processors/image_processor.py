"""What the processors of images have in common: settings of levels, and how they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from pace.llm.models.model_config import count, declared, number, read_number
from pace.llm.processors.settings import read_settings
from pace.media.images import image_size, load_rgb, open_source
from pace.media.media import digest_of
from pace.media.patches import level_table

Plan = TypeVar("Plan")

ONLY: dict[str, tuple] = {
    "do_convert_rgb": (True,),
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_center_crop": (False,),
    "do_pad": (False,),
    "input_data_format": (),
}
"""Settings that most families only have with these values."""
WITHOUT_EFFECT = frozenset(
    """processor_class auto_map crop_size pad_size data_format default_to_square device return_tensors
    disable_grouping image_seq_length _valid_processor_keys""".split()
)
"""Settings that change nothing, unless a family has a field of that name."""
NO_LIMIT = 1 << 60
"""More tokens than any image has."""


def limit_of(max_tokens: int | None) -> int:
    """The limit of an image's tokens, NO_LIMIT for None. Raises ValueError for one below 1."""
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1; got {max_tokens}")
    return NO_LIMIT if max_tokens is None else max_tokens


def nearest_grid(height: int, width: int, tile: int, grids: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The grid, columns and rows of tiles, whose aspect ratio is nearest to the image's; one tile if there is none. Of
    grids of the same ratio, a later one counts if the image has more than half of its pixels."""
    best, least = (1, 1), math.inf
    for columns, rows in grids:
        distance = abs(width / height - columns / rows)
        is_filled = height * width > 0.5 * tile**2 * columns * rows
        if distance < least or (distance == least and is_filled):
            best, least = (columns, rows), distance
    return best


def backends(*names: str) -> dict[str, tuple]:
    """The setting `image_processor_type`: processors of transformers with these names, of any backend."""
    return {"image_processor_type": tuple(f"{name}{backend}" for name in names for backend in ("", "Fast", "Pil"))}


def square(default: int, maximum: int) -> Any:
    """A field with the sides of a square in pixels, as one number or as equal height and width."""

    def read(value: Any) -> int:
        sides = list(value.values()) if isinstance(value, dict) and value.keys() == {"height", "width"} else [value] * 2
        if sides[0] != sides[1] or type(sides[0]) is not int or not 1 <= sides[0] <= maximum:
            raise ValueError(f"an object with equal height and width in 1..{maximum}")
        return sides[0]

    return declared(default, read)


def channels(default: tuple[float, float, float], low: float) -> Any:
    """A field with one number for each channel; a single number counts for all three."""

    def read(value: Any) -> tuple[float, ...]:
        values = value if isinstance(value, list) else [value] * 3
        try:
            numbers = tuple(read_number(item, low, 1e6) for item in values)
        except ValueError:
            numbers = ()
        if len(numbers) != 3:
            raise ValueError(f"a number in {low:g}..1e6, or a list of three")
        return numbers

    return declared(default, read)


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Base class of processors of images. Its fields are settings of one checkpoint, under their names in
    preprocessor_config.json."""

    kind: ClassVar[str] = "image"
    needs_settings: ClassVar[bool] = True
    """False if config.json and the family have all settings."""
    only: ClassVar[Mapping[str, tuple]] = ONLY
    """Settings that are only implemented for these values."""
    without_effect: ClassVar[Collection[str]] = WITHOUT_EFFECT
    """Settings that change nothing for an image of the family."""

    resample: int = count(3, 5, 0)
    """Number of Pillow's filter: 1 is Lanczos, 2 bilinear, 3 bicubic."""
    rescale_factor: float = number(1 / 255, 1e-6, 1e6)
    image_mean: tuple[float, ...] = channels((0.5, 0.5, 0.5), -1e6)
    image_std: tuple[float, ...] = channels((0.5, 0.5, 0.5), 1e-6)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], file: str = "preprocessor_config.json") -> Self:
        """Reads the settings of `raw`. Raises ValueError or NotImplementedError that names `file` and the field."""
        return cls(**read_settings(cls, raw, file, cls.only, cls.without_effect))

    def within(self, whole: dict[str, Any]) -> Self:
        """Returns this processor with what the settings of the whole processor, of texts and images, say about the
        text of an image. Raises ValueError that names the field."""
        return self

    def for_model(self, config: dict[str, Any]) -> Self:
        """Returns this processor with what config.json says about the tower. Raises ValueError if the two contradict
        each other."""
        return self

    def among(self, num_images: int) -> Any:
        """Returns the processor for each image of a prompt with this number of images, from 1 on."""
        return self

    def decode(self, source: Any, plan: Callable[[int, int], Plan]) -> tuple[Any, Plan, bytes]:
        """Decodes an image, after `plan(height, width)` has decided from its header what becomes of it. Returns the
        image, the plan, and a digest of both and of these settings. Raises as `MediaProcessor.prepare`."""
        opened = open_source(source)
        planned = plan(*image_size(opened))
        image = load_rgb(opened)
        return image, planned, digest_of(repr((self, image.size, planned)), image.tobytes())

    @property
    def least_tokens(self) -> int:
        """Tokens that every image has at least, however small it is made."""
        return 1

    @cached_property
    def table(self) -> np.ndarray:
        """Normalised value of each level of each channel, float32 `[3, 256]`."""
        return level_table(self.rescale_factor, self.image_mean, self.image_std)
