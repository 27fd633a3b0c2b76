"""PaddleOCR-VL: Ernie 4.5 with rotated halves, which also takes the rows of images."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import RopeConfig
from pace.llm.models.families.ernie4_5 import Ernie4_5ForCausalLM, Ernie45Config
from pace.llm.models.families.qwen_vl import SeesImages, SeesImagesConfig, text_rope
from pace.llm.models.takes_media import read_token_id
from pace.llm.models.towers.paddleocr_vl import PaddleOCRTower, PaddleOCRVisionConfig


@dataclass(frozen=True, kw_only=True)
class PaddleOCRVLConfig(SeesImagesConfig, Ernie45Config):
    vision: PaddleOCRVisionConfig | None = None
    image_token_id: int = 100295

    default_sections: ClassVar[tuple[int, int, int]] = (16, 24, 24)
    alternates: ClassVar[bool] = False

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The fields about text. A head is also tied if `text_config` says it or nothing, as in transformers."""
        fields, text = super().text_part(raw), raw.get("text_config")
        if isinstance(text, dict) and text.get("tie_word_embeddings", True) is True:
            fields["tie_word_embeddings"] = True
        return fields

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return text_rope(fields, 5e5, head_dim, self.max_position_embeddings)

    def read_media(self, raw: dict[str, Any]) -> Any:
        vision = dataclasses.replace(PaddleOCRVisionConfig.read(raw["vision_config"]), out_hidden_size=self.hidden_size)
        rope = dataclasses.replace(self.rope, sections=self.read_sections(raw))
        placeholder = read_token_id(raw, ("image_token_id",), self.image_token_id)
        return dataclasses.replace(self, vision=vision, image_token_id=placeholder, rope=rope)


class PaddleOCRVLForConditionalGeneration(SeesImages, Ernie4_5ForCausalLM):
    Config = PaddleOCRVLConfig
    Tower = PaddleOCRTower
    ignored_tensors = (
        *SeesImages.ignored_tensors,
        r"visual\.vision_model\.(head\..*|embeddings\.(packing_position_embedding\.weight|position_ids))",
    )
    text_prefixes: ClassVar[dict[str, str]] = {
        "model.language_model.": "model.",
        "model.visual.": "visual.",
        "model.projector.": "visual.projector.",
        "mlp_AR.": "visual.projector.",
    }
    other_parts = ("visual.", "model.visual.", "mlp_AR.", "model.projector.")
