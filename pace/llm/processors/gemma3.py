"""Images of Gemma 3: `Gemma3ImageProcessor` of transformers.

An image of any shape is resized to a square, and always has the same number of tokens. Two line breaks and a
token for its beginning come before them, and a token for its end and two line breaks after them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from pace.llm.models.model_config import count, declared
from pace.llm.models.towers.siglip import Gemma3VisionConfig
from pace.llm.processors.image_processor import ImageProcessor
from pace.media.images import image_size, load_rgb, open_source
from pace.media.media import Layout, Media, MediaError
from pace.media.patches import normalised, resize
from pace.naming import counted

BEGIN, END = "<start_of_image>", "<end_of_image>"


def square(default: int) -> Any:
    """The sides of an image, as one number or as equal height and width."""

    def read(value: Any) -> int:
        sides = list(value.values()) if isinstance(value, dict) and value.keys() == {"height", "width"} else [value] * 2
        if sides[0] != sides[1] or type(sides[0]) is not int or not 1 <= sides[0] <= 1 << 14:
            raise ValueError(f"an object with equal height and width in 1..{1 << 14}")
        return sides[0]

    return declared(default, read)


@dataclass(frozen=True, kw_only=True)
class Gemma3ImageProcessor(ImageProcessor):
    """Processor with the settings of one checkpoint. `for_model` adds the patches and the number of tokens."""

    token: ClassVar[str] = "<image_soft_token>"
    marker: ClassVar[str] = BEGIN
    placeholder: ClassVar[str] = BEGIN
    only: ClassVar[Mapping[str, tuple]] = {
        "image_processor_type": ("Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil"),
        "do_convert_rgb": (True,),
        "do_resize": (True,),
        "do_rescale": (True,),
        "do_normalize": (True,),
        "do_center_crop": (False,),
        "do_pad": (False,),
        "do_pan_and_scan": (False,),
        "input_data_format": (),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        """processor_class auto_map crop_size pad_size data_format default_to_square device return_tensors
        disable_grouping image_seq_length _valid_processor_keys pan_and_scan_min_crop_size pan_and_scan_max_num_crops
        pan_and_scan_min_ratio_to_activate""".split()
    )

    resample: int = count(2, 5, 0)
    size: int = square(224)
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
        if vision.image_size != self.size:
            raise ValueError(
                f"config.json: vision_config.image_size = {vision.image_size} contradicts the processor's settings, "
                f"which have {self.size}"
            )
        num_tokens = vision.tokens_per_side**2
        return replace(self, mm_tokens_per_image=num_tokens, patches_per_side=vision.patches_per_side)

    @property
    def least_tokens(self) -> int:
        return self.mm_tokens_per_image

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes and resizes an image, as `MediaProcessor` says. The features are its pixels, float32
        `[1, 3, size, size]`."""
        self._check(max_tokens)
        image = load_rgb(open_source(source))
        digest = hashlib.sha256(repr((self, image.size)).encode())
        digest.update(image.tobytes())
        return Media(
            kind=self.kind,
            features=normalised(resize(image, self.size, self.size, self.resample)[None], self.table),
            grid=(1, self.patches_per_side, self.patches_per_side),
            num_tokens=self.mm_tokens_per_image,
            digest=digest.digest(),
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
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1; got {max_tokens}")
        if max_tokens is not None and max_tokens < self.mm_tokens_per_image:
            raise MediaError(
                f"an image of any size has {counted(self.mm_tokens_per_image, 'token')} in this model, but may only "
                f"have {max_tokens}"
            )
