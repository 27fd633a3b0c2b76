"""Images of LLaVA: `CLIPImageProcessor`, `LlavaImageProcessor` and `SiglipImageProcessor` of transformers.

Every image is resized and cropped to the size that the tower takes, and has the same number of tokens. Checkpoints with
Pixtral's tower have Pixtral's processor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from pace.llm.models.families.llava import read_llava_vision
from pace.llm.models.model_config import declared, flag
from pace.llm.models.towers.clip import num_llava_tokens
from pace.llm.models.towers.projector import ProjectorConfig
from pace.llm.processors.image_processor import ONLY, WITHOUT_EFFECT, ImageProcessor, backends, channels, limit_of
from pace.llm.processors.pixtral import PixtralImageProcessor
from pace.llm.processors.settings import read_token
from pace.media.containers import MAX_PIXELS
from pace.media.images import image_size, pillow
from pace.media.media import Layout, Media, MediaError
from pace.media.patches import normalised, resize
from pace.naming import counted, shown

MAX_SIDE = 1 << 12
"""Upper bound of sides in the settings. Checkpoints have up to 448."""

Size = tuple[int, int]
"""Height and width in pixels."""


def is_side(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_SIDE


def shortest_edge(default: int) -> Any:
    """What the size after the resize is given by: the shortest edge, a number, or both sides."""

    def read(value: Any) -> int | Size:
        fields = value if isinstance(value, dict) else {"shortest_edge": value}
        given = {name: side for name, side in fields.items() if side is not None}
        if not all(map(is_side, given.values())) or given.keys() not in ({"shortest_edge"}, {"height", "width"}):
            raise ValueError(f"an object with shortest_edge, or with height and width, integers in 1..{MAX_SIDE}")
        return given["shortest_edge"] if len(given) == 1 else (given["height"], given["width"])

    return declared(default, read)


def sides(default: int) -> Any:
    """Height and width; a single number counts for both."""

    def read(value: Any) -> Size:
        fields = value if isinstance(value, dict) else {"height": value, "width": value}
        if fields.keys() != {"height", "width"} or not all(map(is_side, fields.values())):
            raise ValueError(f"an object with height and width, integers in 1..{MAX_SIDE}")
        return fields["height"], fields["width"]

    return declared((default, default), read)


@dataclass(frozen=True, kw_only=True)
class LlavaImageProcessor(ImageProcessor):
    """Processor with the settings of one checkpoint. `for_model` adds the patches and the number of tokens."""

    only: ClassVar[Mapping[str, tuple]] = ONLY | backends("CLIPImageProcessor", "LlavaImageProcessor")
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {"feature_extractor_type"}

    image_mean: tuple[float, ...] = channels((0.48145466, 0.4578275, 0.40821073), -1e6)
    image_std: tuple[float, ...] = channels((0.26862954, 0.26130258, 0.27577711), 1e-6)
    do_pad: bool = flag(False)
    """True if an image is first padded to a square."""
    size: int | Size = shortest_edge(224)
    do_center_crop: bool = flag(True)
    crop_size: Size = sides(224)
    token: str = "<image>"
    """Text of a placeholder."""
    patches_per_side: int = 1
    num_tokens: int = 1
    """Tokens of every image."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any], file: str = "preprocessor_config.json") -> Any:
        kind = str(raw.get("image_processor_type"))
        if cls is LlavaImageProcessor and kind.startswith("Pixtral"):
            return PixtralImageProcessor.from_dict(raw, file)
        if cls is LlavaImageProcessor and kind.startswith("Siglip"):
            return SiglipImageProcessor.from_dict(raw, file)
        processor = super().from_dict(raw, file)
        if processor.do_pad and not kind.startswith("Llava"):
            raise NotImplementedError(f"{file}: do_pad = True is not implemented for {kind}")
        return processor

    @property
    def marker(self) -> str:
        return self.token

    @property
    def placeholder(self) -> str:
        return self.token

    def within(self, whole: dict[str, Any]) -> Self:
        return replace(self, token=read_token(whole, "image_token", self.token))

    def for_model(self, config: dict[str, Any]) -> Self:
        """This processor with what config.json says about the tower. Raises ValueError if the tower takes images of
        another size."""
        if not isinstance(config.get("vision_config"), dict):
            return self
        vision, projector = read_llava_vision(config), ProjectorConfig.read(config)
        if self.final_size != (vision.image_size, vision.image_size):
            raise ValueError(
                f"config.json: vision_config.image_size = {vision.image_size} contradicts the processor's settings, "
                f"whose images have the size {shown(self.final_size)}"
            )
        num_tokens = num_llava_tokens(vision, projector)
        return replace(self, patches_per_side=vision.patches_per_side, num_tokens=num_tokens)

    @property
    def final_size(self) -> Size | None:
        """Size of every image; None if it depends on the image."""
        return self.crop_size if self.do_center_crop else None if isinstance(self.size, int) else self.size

    @property
    def least_tokens(self) -> int:
        return self.num_tokens

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes, resizes and crops an image, as `MediaProcessor` says. The features are its pixels, float32
        `[1, 3, height, width]`."""
        image, _, digest = self.decode(source, lambda *size: self._check(*size, max_tokens))
        if self.do_pad:
            image = padded(image, tuple(int(mean * 255) for mean in self.image_mean))
        pixels = resize(image, *self._resized(image.height, image.width), self.resample)
        if self.do_center_crop:
            pixels = center_crop(pixels, *self.crop_size)
        return Media(
            kind=self.kind,
            features=normalised(pixels[None], self.table),
            grid=(1, self.patches_per_side, self.patches_per_side),
            num_tokens=self.num_tokens,
            digest=digest,
        )

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        """The placeholders of an image. Only its header is read."""
        self._check(*image_size(source), max_tokens)
        return Layout(self.token * self.num_tokens, (self.num_tokens,))

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """`pixel_values` float32 `[images, 3, height, width]`."""
        return {"pixel_values": np.concatenate([medium.features for medium in media])}

    def _resized(self, height: int, width: int) -> Size:
        if not isinstance(self.size, int):
            return self.size
        longest = int(self.size * max(height, width) / min(height, width))
        return (longest, self.size) if width <= height else (self.size, longest)

    def _check(self, height: int, width: int, max_tokens: int | None) -> None:
        """Raises MediaError if an image has more tokens or becomes too large, and ValueError for a limit below 1."""
        if limit_of(max_tokens) < self.num_tokens:
            raise MediaError(
                f"an image has {counted(self.num_tokens, 'token')} in this model, whatever its size, but may only have "
                f"{max_tokens}"
            )
        if self.do_pad:
            height = width = max(height, width)
        if max(height * width, math.prod(self._resized(height, width))) > MAX_PIXELS:
            raise MediaError(
                f"the image is too large or too long and thin: before it is cropped, it would have more than "
                f"{MAX_PIXELS:,} pixels"
            )


@dataclass(frozen=True, kw_only=True)
class SiglipImageProcessor(LlavaImageProcessor):
    """Both sides are stretched to those of the tower, and nothing is cropped, unless the settings differ."""

    only: ClassVar[Mapping[str, tuple]] = ONLY | backends("SiglipImageProcessor")

    image_mean: tuple[float, ...] = channels((0.5, 0.5, 0.5), -1e6)
    image_std: tuple[float, ...] = channels((0.5, 0.5, 0.5), 1e-6)
    size: int | Size = sides(224)
    do_center_crop: bool = flag(False)


def center_crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle `[height, width, 3]` of pixels uint8 `[H, W, 3]`. A smaller image gets black edges."""
    for axis, wanted in enumerate((height, width)):
        missing = wanted - pixels.shape[axis]
        if missing > 0:
            edges = [(0, 0)] * 3
            edges[axis] = -(-missing // 2), missing // 2
            pixels = np.pad(pixels, edges)
        else:
            pixels = pixels.take(range(-missing // 2, -missing // 2 + wanted), axis)
    return pixels


def padded(image: Any, color: tuple[int, ...]) -> Any:
    """An RGB image in the middle of a square of one color."""
    longest = max(image.size)
    square = pillow().new("RGB", (longest, longest), color)
    square.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
    return square
