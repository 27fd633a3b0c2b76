"""LLaVA-OneVision: Qwen2, which takes images of any size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.llava import TakesImagesConfig, read_llava_vision
from pace.llm.models.families.llava_next import NEWLINE_NAMES
from pace.llm.models.families.qwen2 import Qwen2Config, Qwen2ForCausalLM
from pace.llm.models.takes_media import TakesMedia, read_token_id
from pace.llm.models.towers.anyres import OnevisionProjectorConfig, OnevisionTower
from pace.llm.models.towers.projector import OTHER_PARTS, TEXT_PREFIXES


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionConfig(TakesImagesConfig, Qwen2Config):
    projector: OnevisionProjectorConfig | None = None

    beside_text: ClassVar[frozenset[str]] = TakesImagesConfig.beside_text | {
        *("image_grid_pinpoints", "use_image_newline_parameter", "vision_aspect_ratio"),
        *("video_token_id", "video_token_index"),
    }

    def read_media(self, raw: dict[str, Any]) -> Any:
        vision = read_llava_vision(raw, ("siglip_vision_model",), "LlavaOnevision")
        projector = OnevisionProjectorConfig.read(raw).between(vision, self)
        placeholder = read_token_id(raw, ("image_token_index", "image_token_id"), 151646)
        return dataclasses.replace(self, vision=vision, projector=projector, image_token_id=placeholder)


class LlavaOnevisionForConditionalGeneration(TakesMedia, Qwen2ForCausalLM):
    family = "LlavaOnevision"
    Config = LlavaOnevisionConfig
    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES | NEWLINE_NAMES
    other_parts = (*OTHER_PARTS, *NEWLINE_NAMES)

    def make_tower(self) -> OnevisionTower:
        return OnevisionTower(self.config.vision, self.config.projector, self.config.image_token_id)


LlavaOnevisionForConditionalGeneration.of_text = {"qwen2": LlavaOnevisionForConditionalGeneration}
