"""Images of Gemma 3: `Gemma3ImageProcessor` of transformers.

An image of any shape is resized to a square, and always has the same number of tokens. Two line breaks and a
token for its beginning come before them, and a token for its end and two line breaks after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from pace.llm.models.model_config import count
from pace.llm.models.towers.siglip import Gemma3VisionConfig
from pace.llm.processors.image_processor import ONLY, WITHOUT_EFFECT, ImageProcessor, backends, limit_of, square
from pace.llm.processors.settings import check_same
from pace.media.images import image_size
from pace.media.media import Layout, Media, MediaError
from pace.media.patches import normalised, resize
from pace.naming import counted

BEGIN, END = "<start_of_image>", "<end_of_image>"


@dataclass(frozen=True, kw_only=True)
class Gemma3ImageProcessor(ImageProcessor):
    """Processor with the settings of one checkpoint. `for_model` adds the patches and the number of tokens."""

    token: ClassVar[str] = "<image_soft_token>"
    marker: ClassVar[str] = BEGIN
    placeholder: ClassVar[str] = BEGIN
    only: ClassVar[Mapping[str, tuple]] = ONLY | backends("Gemma3ImageProcessor") | {"do_pan_and_scan": (False,)}
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {
        *("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")
    }

    resample: int = count(2, 5, 0)
    size: int = square(224, 1 << 14)
    """Height and width in pixels."""
    mm_tokens_per_image: int = 256
    """Tokens of every image."""
    patches_per_side: int = 16

    def for_model(self, config: dict[str, Any]) -> Self:
        """This processor with the number of tokens that config.json names. Raises ValueError if the tower takes images
        of another size."""
        if not isinstance(config.get("vision_config"), dict):
            return self
        vision = Gemma3VisionConfig.of_whole(config, 0)
        check_same("vision_config.image_size", vision.image_size, self.size)
        num_tokens = vision.tokens_per_side**2
        return replace(self, mm_tokens_per_image=num_tokens, patches_per_side=vision.patches_per_side)

    @property
    def least_tokens(self) -> int:
        return self.mm_tokens_per_image

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes and resizes an image, as `MediaProcessor` says. The features are its pixels, float32
        `[1, 3, size, size]`."""
        image, _, digest = self.decode(source, lambda *size: self._check(max_tokens))
        return Media(
            kind=self.kind,
            features=normalised(resize(image, self.size, self.size, self.resample)[None], self.table),
            grid=(1, self.patches_per_side, self.patches_per_side),
            num_tokens=self.mm_tokens_per_image,
            digest=digest,
        )

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        """The text of an image. Only its header is read."""
        self._check(max_tokens)
        image_size(source)
        return Layout(f"\n\n{BEGIN}{self.token * self.mm_tokens_per_image}{END}\n\n", (self.mm_tokens_per_image,))

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """`pixel_values` float32 `[images, 3, size, size]`."""
        return {"pixel_values": np.concatenate([medium.features for medium in media])}

    def _check(self, max_tokens: int | None) -> None:
        """Raises MediaError if an image has more tokens, and ValueError for a limit below 1."""
        if limit_of(max_tokens) < self.mm_tokens_per_image:
            raise MediaError(
                f"an image of any size has {counted(self.mm_tokens_per_image, 'token')} in this model, but may only "
                f"have {max_tokens}"
            )
