"""Checkpoints of Mistral 3 take images: Mistral Small 3.1, 3.2 and 4, Magistral, Ministral 3. The tower is Pixtral's,
and the text model is of one of several kinds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.ministral3 import Ministral3Config, Ministral3ForCausalLM, without_scale
from pace.llm.models.families.mistral import MistralConfig
from pace.llm.models.families.mistral4 import Mistral4ForCausalLM
from pace.llm.models.families.qwen2 import Qwen2ForCausalLM
from pace.llm.models.takes_media import TakesMedia, TakesMediaConfig, read_token_id
from pace.llm.models.towers.pixtral import Mistral3Tower, PixtralVisionConfig
from pace.llm.models.towers.projector import OTHER_PARTS, TEXT_PREFIXES, Mistral3ProjectorConfig, ProjectorConfig

MISTRAL = {field.name: field.default for field in dataclasses.fields(MistralConfig) if "read" in field.metadata}
"""The defaults of a text part of Mistral, which Mistral 3 may have in place of Ministral 3."""


@dataclass(frozen=True, kw_only=True)
class OfMistral3Config(TakesMediaConfig):
    """Fields about images, in addition to those of the text model."""

    vision: PixtralVisionConfig | None = None
    projector: ProjectorConfig | None = None

    beside_text: ClassVar[frozenset[str]] = frozenset(
        {"vision_config", "image_token_id", "image_token_index", "multimodal_projector_bias", "projector_hidden_act",
         "spatial_merge_size", "vision_feature_layer"}
    )  # fmt: skip

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The text's fields. The head is tied by default if there is a text part."""
        fields = super().text_part(raw)  # type: ignore[misc]  # a mixin
        return fields if raw.get("text_config") is None else {"tie_word_embeddings": True} | fields

    def read_media(self, raw: dict[str, Any]) -> Any:
        vision = PixtralVisionConfig.read(raw["vision_config"])
        projector = Mistral3ProjectorConfig.read(raw).between(vision, self)
        placeholder = read_token_id(raw, ("image_token_index", "image_token_id"), 10)
        return dataclasses.replace(self, vision=vision, projector=projector, image_token_id=placeholder)


class OfMistral3(TakesMedia):
    """A text model that takes images through the tower of Pixtral."""

    family = "Mistral3"
    MediaConfig = OfMistral3Config
    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES
    other_parts = OTHER_PARTS

    def make_tower(self) -> Mistral3Tower:
        config = self.config
        return Mistral3Tower(config.vision, config.projector, config.image_token_id)


@dataclass(frozen=True, kw_only=True)
class Mistral3Config(OfMistral3Config, Ministral3Config):
    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        fields, text = super().text_part(raw), raw.get("text_config")
        if text is None or text.get("model_type", "mistral") == "ministral3":
            return fields
        source, rope = cls.rope_of(fields | {"rope_parameters": fields.get("rope_parameters") or {}})
        return MISTRAL | fields | {source: without_scale(rope)}


class Mistral3ForConditionalGeneration(OfMistral3, Ministral3ForCausalLM):
    """The text model is Mistral or Ministral 3."""

    Config = Mistral3Config


OfMistral3.of_text = {
    "mistral": Mistral3ForConditionalGeneration,
    "ministral3": Mistral3ForConditionalGeneration,
    "llama": OfMistral3.of(LlamaForCausalLM),
    "mistral4": OfMistral3.of(Mistral4ForCausalLM),
    "qwen2": OfMistral3.of(Qwen2ForCausalLM),
}
