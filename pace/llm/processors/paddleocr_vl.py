"""Images of PaddleOCR-VL: `PaddleOCRVLImageProcessor` of transformers. They are those of Qwen2-VL, but patches come row
by row, and a side below that of a token is enlarged first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pace.llm.models.model_config import count
from pace.llm.processors.qwen_vl import MAX_AREA, ONLY, QwenImageProcessor
from pace.media.media import Media
from pace.media.patches import make_patches


@dataclass(frozen=True, kw_only=True)
class PaddleOCRVLImageProcessor(QwenImageProcessor):
    """Processor with the settings of one checkpoint, under their names in preprocessor_config.json."""

    token: ClassVar[str] = "<|IMAGE_PLACEHOLDER|>"
    marker: ClassVar[str] = token
    placeholder: ClassVar[str] = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
    only: ClassVar[Mapping[str, tuple]] = ONLY | {
        "image_processor_type": (
            "PaddleOCRVLImageProcessor",
            "PaddleOCRVLImageProcessorFast",
            "PaddleOCRVLImageProcessorPil",
        ),
    }

    temporal_patch_size: int = count(1, 1)
    min_pixels: int = count(384 * 384, MAX_AREA)
    max_pixels: int = count(1536 * 1536, MAX_AREA)

    @property
    def sizes(self) -> dict[str, int]:
        return {"patch_size": self.patch_size, "spatial_merge_size": self.merge_size}

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        return make_patches(pixels, self.table, self.patch_size, 1, 1)

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """`pixel_values` float32 `[sum of N, 3, patch_size, patch_size]` and `image_grid_thw` int64 `[images, 3]`."""
        arrays = super().arrays(media)
        patches = arrays["pixel_values"].reshape(-1, 3, self.patch_size, self.patch_size)
        return arrays | {"pixel_values": patches}

    def target_size(self, height: int, width: int, max_tokens: int | None = None) -> tuple[int, int]:
        factor = self.factor
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        return super().target_size(height, width, max_tokens)
