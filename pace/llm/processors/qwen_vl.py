"""Images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-Omni: `Qwen2VLImageProcessor` of transformers.

An image is resized to sides that are multiples of `patch_size * merge_size`, with an area between `min_pixels` and
`max_pixels`. Its patches are normalised and ordered in blocks of `merge_size` x `merge_size`, which make one token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from pace.llm.models.model_config import count
from pace.llm.processors.image_processor import ONLY, WITHOUT_EFFECT, ImageProcessor, backends, channels, limit_of
from pace.llm.processors.settings import check_same, read_settings
from pace.media.images import image_size
from pace.media.media import Layout, Media, MediaError
from pace.media.patches import make_patches, resize
from pace.naming import counted, shown

MAX_ASPECT = 200
"""Longest side over shortest side of an image, as in transformers."""
MAX_AREA = 1 << 28
"""Upper bound of `max_pixels`. Checkpoints have up to 2^24."""

AREAS = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
"""Names of the areas within `size` -> names of the fields. The first have nothing to do with edges."""
OF_SOUND = frozenset(
    """chunk_length dither feature_extractor_type feature_size hop_length n_fft n_samples nb_max_frames padding_side
    padding_value return_attention_mask sampling_rate""".split()
)
"""Settings about sound: Qwen3-Omni has one file for both."""


@dataclass(frozen=True, kw_only=True)
class QwenImageProcessor(ImageProcessor):
    """Processor with the settings of one checkpoint, under their names in preprocessor_config.json."""

    token: ClassVar[str] = "<|image_pad|>"
    marker: ClassVar[str] = token
    placeholder: ClassVar[str] = "<|vision_start|><|image_pad|><|vision_end|>"
    only: ClassVar[Mapping[str, tuple]] = ONLY | backends("Qwen2VLImageProcessor")
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT | OF_SOUND

    patch_size: int = count(14, 256)
    merge_size: int = count(2, 16)
    temporal_patch_size: int = count(2, 16)
    """Frames of a patch. A still image fills all of them."""
    min_pixels: int = count(56 * 56, MAX_AREA)
    max_pixels: int = count(28 * 28 * 1280, MAX_AREA)
    image_mean: tuple[float, ...] = channels((0.48145466, 0.4578275, 0.40821073), -1e6)
    image_std: tuple[float, ...] = channels((0.26862954, 0.26130258, 0.27577711), 1e-6)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], file: str = "preprocessor_config.json") -> Self:
        """Reads the settings of `raw`. Raises ValueError or NotImplementedError that names `file` and the field."""
        processor = cls(**read_settings(cls, with_areas(raw, file), file, cls.only, cls.without_effect))
        if processor.min_pixels > processor.max_pixels:
            raise ValueError(
                f"{file}: min_pixels must not exceed max_pixels; got {processor.min_pixels} and {processor.max_pixels}"
            )
        return processor

    def for_model(self, config: dict[str, Any]) -> Self:
        """Returns this processor. Raises ValueError if the patches are not those of the tower of config.json."""
        vision_config = config.get("vision_config")
        if not isinstance(vision_config, dict):
            return self
        for name, own in self.sizes.items():
            check_same(f"vision_config.{name}", vision_config.get(name, own), own)
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """Fields of `vision_config`, and the values that the patches need."""
        return {
            "patch_size": self.patch_size,
            "temporal_patch_size": self.temporal_patch_size,
            "spatial_merge_size": self.merge_size,
        }

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.patch_size * self.merge_size

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes, resizes and cuts an image, as `MediaProcessor` says."""
        image, size, digest = self.decode(source, lambda *sides: self.target_size(*sides, max_tokens))
        return Media(
            kind=self.kind,
            features=self.patches(resize(image, *size, self.resample)),
            grid=(1, size[0] // self.patch_size, size[1] // self.patch_size),
            num_tokens=self.tokens_of(size),
            digest=digest,
        )

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """Patches float32 `[N, K]` of pixels uint8 `[H, W, 3]`, in the tower's order."""
        return make_patches(pixels, self.table, self.patch_size, self.merge_size, self.temporal_patch_size)

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        """The placeholders of an image, from its header."""
        num_tokens = self.tokens_of(self.target_size(*image_size(source), max_tokens))
        return Layout(self.token * num_tokens, (num_tokens,))

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """`pixel_values` float32 `[sum of N, K]` and `image_grid_thw` int64 `[images, 3]`."""
        return {
            "pixel_values": np.concatenate([medium.features for medium in media]),
            "image_grid_thw": np.array([medium.grid for medium in media], np.int64),
        }

    def tokens_of(self, size: tuple[int, int]) -> int:
        return size[0] // self.factor * (size[1] // self.factor)

    def target_size(self, height: int, width: int, max_tokens: int | None = None) -> tuple[int, int]:
        """Height and width after the resize. `max_tokens` lowers `max_pixels`.

        Raises MediaError for an image that is longer than `MAX_ASPECT` times its other side, or that cannot have so few
        tokens."""
        factor, max_pixels = self.factor, self.max_pixels
        limit = limit_of(max_tokens)
        max_pixels = min(max_pixels, limit * factor**2)
        size = smart_resize(height, width, factor, min(self.min_pixels, max_pixels), max_pixels)
        if self.tokens_of(size) > limit:
            raise MediaError(
                f"an image of {width} x {height} pixels needs {self.tokens_of(size)} tokens, but may only have "
                f"{counted(limit, 'token')}; cut it to a shape nearer to a square"
            )
        return size


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Multiples of `factor` near height and width, with an area in `min_pixels..max_pixels` and the aspect ratio nearly
    kept. Half a factor is rounded to even. Raises MediaError for an image that is too long and thin."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise MediaError(
            f"the image is too long and thin: {width} x {height} pixels; one side may be {MAX_ASPECT} times the other"
        )
    sides = [round(side / factor) * factor for side in (height, width)]
    if sides[0] * sides[1] > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
    elif sides[0] * sides[1] < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def with_areas(raw: dict[str, Any], file: str) -> dict[str, Any]:
    """Moves the areas of `size` to min_pixels and max_pixels. Raises ValueError if both are there and differ."""
    fields = {name: value for name, value in raw.items() if name != "size" and value is not None}
    size: Any = raw.get("size")
    if size is None:
        return fields
    spellings = (set(AREAS), set(AREAS.values()))
    if not isinstance(size, dict) or size.keys() not in spellings or None in size.values():
        raise ValueError(f"{file}: size must have shortest_edge and longest_edge, which are areas; got {shown(size)}")
    for name, value in size.items():
        field = AREAS[name] if name in AREAS else name
        if fields.setdefault(field, value) != value:
            raise ValueError(
                f"{file}: {field} = {shown(fields[field])} contradicts size.{name} = {shown(value)}; keep one of them"
            )
    return fields
