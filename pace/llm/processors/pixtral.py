"""Images of Mistral 3 and Pixtral: `PixtralImageProcessor` of transformers, and the text that shows them in a prompt.

An image keeps its shape. It is shrunk if it is longer than `size`, and stretched to whole tokens. In a prompt, each row
of tokens ends with `[IMG_BREAK]`, and the last one with `[IMG_END]`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from pace.llm.models.model_config import declared
from pace.llm.models.towers.pixtral import PixtralVisionConfig, runs_of
from pace.llm.models.towers.projector import Mistral3ProjectorConfig
from pace.llm.processors.image_processor import ONLY, WITHOUT_EFFECT, ImageProcessor, backends, channels, limit_of
from pace.llm.processors.settings import read_token
from pace.media.images import image_size
from pace.media.media import Layout, Media, MediaError
from pace.media.patches import normalised, resize
from pace.naming import counted

MAX_SIDE = 1 << 14
"""Upper bound of `size`. Checkpoints have up to 1540."""


def largest(default: int) -> Any:
    """The largest height and width of an image: one number, `longest_edge`, or both."""

    def read(value: Any) -> tuple[int, int]:
        fields = value if isinstance(value, dict) else {"longest_edge": value}
        given = {name: side for name, side in fields.items() if side is not None}
        sides = [given[name] for name in ("height", "width") if name in given] or [given.get("longest_edge")] * 2
        if given.keys() not in ({"longest_edge"}, {"height", "width"}) or not all(
            type(side) is int and 1 <= side <= MAX_SIDE for side in sides
        ):
            raise ValueError(f"an object with longest_edge, or with height and width, integers in 1..{MAX_SIDE}")
        return sides[0], sides[1]

    return declared((default, default), read)


@dataclass(frozen=True, kw_only=True)
class PixtralImageProcessor(ImageProcessor):
    """Processor with the settings of one checkpoint. `for_model` adds the patches."""

    only: ClassVar[Mapping[str, tuple]] = ONLY | backends("PixtralImageProcessor") | {"do_pad": (True,)}
    # The patches are those of the whole processor, which are those of the tower.
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {"patch_size"}

    image_mean: tuple[float, ...] = channels((0.48145466, 0.4578275, 0.40821073), -1e6)
    image_std: tuple[float, ...] = channels((0.26862954, 0.26130258, 0.27577711), 1e-6)
    size: tuple[int, int] = largest(1024)
    """Largest height and width in pixels."""
    token: str = "[IMG]"
    """Text of a placeholder."""
    after_row: str = "[IMG_BREAK]"
    """Text after each row of placeholders but the last one."""
    after_image: str = "[IMG_END]"
    patch: int = 16
    """Side of a patch in pixels."""
    merge: int = 1
    """Side of the square of patches that becomes one token."""

    @property
    def marker(self) -> str:
        return self.token

    @property
    def placeholder(self) -> str:
        return self.token

    def within(self, whole: dict[str, Any]) -> Self:
        return replace(
            self,
            token=read_token(whole, "image_token", self.token),
            after_row=read_token(whole, "image_break_token", self.after_row),
            after_image=read_token(whole, "image_end_token", self.after_image),
        )

    def for_model(self, config: dict[str, Any]) -> Self:
        if not isinstance(config.get("vision_config"), dict):
            return self
        patch, merge = PixtralVisionConfig.read(config["vision_config"]).patch_size, 1
        if "Mistral3ForConditionalGeneration" in config.get("architectures", ()):
            merge = Mistral3ProjectorConfig.read(config).spatial_merge_size
        return replace(self, patch=patch, merge=merge)

    @property
    def unit(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.patch * self.merge

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes and resizes an image, as `MediaProcessor` says. The features are its pixels, float32
        `[1, 3, height, width]`."""
        image, (height, width), digest = self.decode(source, lambda *size: self.target_size(*size, max_tokens))
        runs = runs_of(height // self.unit, width // self.unit)
        return Media(
            kind=self.kind,
            features=normalised(resize(image, height, width, self.resample)[None], self.table),
            grid=(1, height // self.patch, width // self.patch),
            num_tokens=sum(runs),
            digest=digest,
            runs=runs,
        )

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        """The text of an image, from its header."""
        height, width = self.target_size(*image_size(source), max_tokens)
        rows, columns = height // self.unit, width // self.unit
        text = self.after_row.join([self.token * columns] * rows) + self.after_image
        return Layout(text, runs_of(rows, columns))

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """`pixel_values` float32 `[images, 3, H, W]`, zeros beyond an image, and `image_sizes` int64 `[images, 2]`."""
        sizes = np.array([medium.features.shape[2:] for medium in media], np.int64)
        pixels = np.zeros((len(media), 3, *sizes.max(0)), np.float32)
        for image, medium in zip(pixels, media):
            height, width = medium.features.shape[2:]
            image[:, :height, :width] = medium.features[0]
        return {"pixel_values": pixels, "image_sizes": sizes}

    def target_size(self, height: int, width: int, max_tokens: int | None = None) -> tuple[int, int]:
        """Height and width after the resize. `max_tokens` lowers `size`, in proportion.

        Raises MediaError for an image that would have no pixels in one direction, or that cannot have so few tokens."""

        def size(edge: int) -> tuple[int, int]:
            limits = [side * edge / max(self.size) for side in self.size]
            ratio = max(1, height / limits[0], width / limits[1])
            shrunk = (math.floor(side / ratio) if ratio > 1 else side for side in (height, width))
            rows, columns = (-(-side // self.unit) for side in shrunk)
            return rows * self.unit, columns * self.unit

        def num_tokens(edge: int) -> int:
            return size(edge)[0] * size(edge)[1] // self.unit**2

        limit, longest = limit_of(max_tokens), max(self.size)
        if not num_tokens(longest):
            raise MediaError(
                f"the image is too long and thin: {width} x {height} pixels would be less than one pixel wide where "
                f"the longest side is {longest}"
            )
        edge = bisect_right(range(1, longest + 1), limit, key=num_tokens)
        if not edge or not num_tokens(edge):
            raise MediaError(
                f"an image of {width} x {height} pixels needs more tokens, but may only have "
                f"{counted(limit, 'token')}; cut it to a shape nearer to a square"
            )
        return size(edge)
