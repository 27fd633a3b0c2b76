"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3, which also take the rows of images.

Every token has three positions: in time, height and width. They are equal for text. Those of an image start where the
text before it ended, and the text after it goes on behind the largest of them (M-RoPE).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pace.llm.layers import RopeConfig
from pace.llm.models.families.qwen2 import Qwen2Config, Qwen2ForCausalLM
from pace.llm.models.families.qwen3 import Qwen3Config, Qwen3ForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, number, token_ids
from pace.llm.models.rope_config import read_rope
from pace.llm.models.takes_media import TakesMedia, TakesMediaConfig, read_token_id
from pace.llm.models.towers.qwen_vision import (
    Qwen2_5VisionTower,
    Qwen2VisionTower,
    Qwen3VisionTower,
    QwenVisionTower,
)
from pace.llm.models.towers.qwen_vision_config import (
    Qwen2_5VisionConfig,
    Qwen2VisionConfig,
    Qwen3VisionConfig,
    QwenVisionConfig,
)
from pace.media.media import MediaSpan
from pace.naming import shown

logger = logging.getLogger("pace")

BESIDE_TEXT = frozenset(
    {
        "vision_config",
        "vision_token_id",
        *(f"{name}_token_id" for name in ("image", "video", "vision_start", "vision_end")),
    }
)
TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "model.visual.": "visual.",
}
OTHER_PARTS = ("visual.", "model.visual.")
INTERLEAVED = ("mrope_interleaved", "interleaved")
"""Names of the flag that frequencies of time, height and width alternate."""


def text_rope(
    fields: dict[str, Any], default_theta: float, head_dim: int, max_positions: int, **options: Any
) -> RopeConfig:
    """The rotation of text. It does not depend on how frequencies are distributed over the three positions. `options`
    are those of `read_rope`."""
    fields = dict(fields)
    for source in ("rope_scaling", "rope_parameters"):
        if isinstance(values := fields.get(source), dict):
            fields[source] = {
                name: value for name, value in values.items() if name not in ("mrope_section", *INTERLEAVED)
            }
    return read_rope(
        fields, head_dim, max_positions, kind_names={"mrope": "default"}, default_theta=default_theta, **options
    )


@dataclass(frozen=True, kw_only=True)
class SeesImagesConfig(TakesMediaConfig):
    """Fields about images, in addition to those of the text model."""

    vision: QwenVisionConfig | None = None
    image_token_id: int = 151655

    beside_text: ClassVar[frozenset[str]] = BESIDE_TEXT
    Vision: ClassVar[type[QwenVisionConfig]]
    default_sections: ClassVar[tuple[int, int, int]]
    alternates: ClassVar[bool]
    """True if frequencies of time, height and width alternate."""

    def read_media(self, raw: dict[str, Any]) -> Any:
        vision = self.Vision.read(raw["vision_config"])
        if vision.out_hidden_size != self.hidden_size:
            raise ValueError(
                f"config.json: vision_config.out_hidden_size must be the text's hidden_size, {self.hidden_size}; got "
                f"{vision.out_hidden_size}"
            )
        rope = dataclasses.replace(self.rope, sections=self.read_sections(raw), alternates=self.alternates)
        placeholder = read_token_id(raw, ("image_token_id",), self.image_token_id)
        return dataclasses.replace(self, vision=vision, image_token_id=placeholder, rope=rope)

    def read_sections(self, raw: dict[str, Any]) -> tuple[int, int, int]:
        """Reads `mrope_section`: the frequencies of a head for time, height and width."""
        text, given = raw.get("text_config") or raw, None
        for source in ("rope_parameters", "rope_scaling"):
            if isinstance(values := text.get(source), dict):
                given = values.get("mrope_section", given)
                for name in INTERLEAVED:
                    if values.get(name) not in (None, self.alternates):
                        raise NotImplementedError(
                            f"config.json: {name} = {shown(values[name])} is not implemented for this architecture"
                        )
        sections = list(self.default_sections) if given is None else given
        half, allowed = self.rope.dim // 2, "three numbers"
        if not self.alternates:
            allowed += f" whose sum is {half}, the frequencies of a head"
        if (
            not isinstance(sections, list)
            or len(sections) != 3
            or not all(type(section) is int and section >= 0 for section in sections)
            or (not self.alternates and sum(sections) != half)
        ):
            raise ValueError(f"config.json: mrope_section must be {allowed}; got {shown(sections)}")
        return tuple(sections)


class SeesImages(TakesMedia):
    """A text model that takes images, with three positions for each token."""

    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES
    other_parts = OTHER_PARTS
    Tower: ClassVar[type[QwenVisionTower]]

    def make_tower(self) -> QwenVisionTower:
        return self.Tower(self.config.vision, self.config.image_token_id)

    def angle_positions(self, media: Sequence[MediaSpan], start: int, end: int) -> np.ndarray:
        positions = np.tile(np.arange(start, end), (3, 1))
        lag = 0  # positions of text behind the index of its tokens
        for span in media:
            offsets, num_taken = self.tower(span.media.kind).angle_offsets(span.media)
            first, last = max(start, span.start), min(end, span.end)
            if first < last:
                positions[:, first - start : last - start] = (
                    span.start - lag + offsets[:, first - span.start : last - span.start]
                )
            lag += span.media.num_tokens - num_taken
            after = max(start, span.end)
            positions[:, after - start :] = np.arange(after, max(after, end)) - lag
        return positions


@dataclass(frozen=True, kw_only=True)
class Qwen2_5_VLConfig(SeesImagesConfig, Qwen2Config):
    vocab_size: int = count(152064)
    hidden_size: int = count(8192)
    intermediate_size: int = count(29568)
    num_hidden_layers: int = count(80, MAX_LAYERS)
    num_attention_heads: int = count(64)
    num_key_value_heads: int | None = count(8, optional=True)
    max_window_layers: int = count(80, MAX_POSITIONS, minimum=0)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(151643)
    eos_token_id: int | tuple[int, ...] | None = token_ids(151645)

    Vision: ClassVar[type[QwenVisionConfig]] = Qwen2_5VisionConfig
    default_sections: ClassVar[tuple[int, int, int]] = (16, 24, 24)
    alternates: ClassVar[bool] = False

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return text_rope(fields, 1e6, head_dim, self.max_position_embeddings)


class Qwen2_5_VLForConditionalGeneration(SeesImages, Qwen2ForCausalLM):
    Config = Qwen2_5_VLConfig
    Tower = Qwen2_5VisionTower


@dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(Qwen2_5_VLConfig):
    Vision: ClassVar[type[QwenVisionConfig]] = Qwen2VisionConfig


class Qwen2VLForConditionalGeneration(SeesImages, Qwen2ForCausalLM):
    Config = Qwen2VLConfig
    Tower = Qwen2VisionTower


@dataclass(frozen=True, kw_only=True)
class OfQwen3VLConfig(SeesImagesConfig):
    """What the dense models and the mixtures of Qwen3-VL have in common."""

    max_position_embeddings: int = count(128000, MAX_POSITIONS)

    Vision: ClassVar[type[QwenVisionConfig]] = Qwen3VisionConfig
    default_sections: ClassVar[tuple[int, int, int]] = (24, 20, 20)
    alternates: ClassVar[bool] = True

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return text_rope(fields, 5e5, head_dim, self.max_position_embeddings)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        if any(super(OfQwen3VLConfig, self).window(layer) for layer in range(self.num_hidden_layers)):
            logger.warning("config.json: sliding_window is ignored, as transformers does for Qwen3VL")
        return super().derived(fields)

    def window(self, layer: int) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(OfQwen3VLConfig, Qwen3Config):
    hidden_size: int = count(4096)


class Qwen3VLForConditionalGeneration(SeesImages, Qwen3ForCausalLM):
    Config = Qwen3VLConfig
    Tower = Qwen3VisionTower
