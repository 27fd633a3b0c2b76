"""LFM2-VL and LFM2.5-VL: LFM2, which also takes the rows of images."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.lfm2 import Lfm2Config, Lfm2ForCausalLM
from pace.llm.models.families.lfm2_moe import Lfm2MoeForCausalLM
from pace.llm.models.takes_media import TakesMedia, TakesMediaConfig, read_token_id
from pace.llm.models.towers.lfm2_vl import Lfm2VlProjectorConfig, Lfm2VlTower, Siglip2VisionConfig

OF_PROCESSOR = """do_image_splitting encoder_patch_size max_image_tokens max_num_patches max_pixels_tolerance max_tiles
min_image_tokens min_tiles tile_size use_image_special_tokens use_thumbnail"""
"""Fields that early checkpoints repeat here; those of the processor's own file count."""


@dataclass(frozen=True, kw_only=True)
class SeesTilesConfig(TakesMediaConfig):
    """Fields about images, in addition to those of the text model."""

    vision: Siglip2VisionConfig | None = None
    projector: Lfm2VlProjectorConfig | None = None
    image_token_id: int = 396

    beside_text: ClassVar[frozenset[str]] = frozenset(
        {
            *("image_token_id", "image_token_index", "vision_config", "vision_feature_layer"),
            *(field.name for field in dataclasses.fields(Lfm2VlProjectorConfig)),
            *OF_PROCESSOR.split(),
        }
    )

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The text's fields. Fields about a tied head count only at the top level."""
        fields = super().text_part(raw)
        if raw.get("text_config") is None:
            return fields
        fields.pop("tie_embedding", None)
        return fields | {"tie_word_embeddings": raw.get("tie_embedding", raw.get("tie_word_embeddings", True))}

    def read_media(self, raw: dict[str, Any]) -> Any:
        return dataclasses.replace(
            self,
            vision=Siglip2VisionConfig.read(raw["vision_config"]),
            projector=Lfm2VlProjectorConfig.read(raw),
            image_token_id=read_token_id(raw, ("image_token_id", "image_token_index"), 396),
        )


class SeesTiles(TakesMedia):
    """A text model that takes images as tiles of different shapes."""

    family = "Lfm2Vl"
    MediaConfig = SeesTilesConfig
    text_prefixes: ClassVar[dict[str, str]] = {
        "model.language_model.": "model.",
        "language_model.": "model.",
        "model.vision_tower.vision_model.": "vision_tower.",
        "vision_tower.vision_model.": "vision_tower.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "vision_tower.multi_modal_projector.",
        "multi_modal_projector.": "vision_tower.multi_modal_projector.",
    }
    other_parts = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")
    ignored_tensors: ClassVar[tuple[str, ...]] = (*Lfm2ForCausalLM.ignored_tensors, r"vision_tower\.head\..*")

    def make_tower(self) -> Lfm2VlTower:
        config = self.config
        return Lfm2VlTower(config.vision, config.projector, config.hidden_size, config.image_token_id)


@dataclass(frozen=True, kw_only=True)
class Lfm2VlConfig(SeesTilesConfig, Lfm2Config):
    pass


class Lfm2VlForConditionalGeneration(SeesTiles, Lfm2ForCausalLM):
    Config = Lfm2VlConfig


SeesTiles.of_text = {
    "lfm2": Lfm2VlForConditionalGeneration,
    "lfm2_moe": SeesTiles.of(Lfm2MoeForCausalLM),
}
