"""LLaVA: a text model of any of several families, and a tower. LLaVA 1.5 and BakLLaVA have CLIP, Pixtral its own tower,
and others SigLIP."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.gemma import GemmaForCausalLM
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mistral import MistralForCausalLM
from pace.llm.models.families.phi3 import Phi3ForCausalLM
from pace.llm.models.families.qwen2 import Qwen2ForCausalLM
from pace.llm.models.families.qwen3 import Qwen3ForCausalLM
from pace.llm.models.takes_media import TakesMedia, TakesMediaConfig, read_token_id
from pace.llm.models.towers.clip import ClipVisionConfig, LlavaClipTower, LlavaTower
from pace.llm.models.towers.pixtral import LlavaPixtralTower, PixtralVisionConfig
from pace.llm.models.towers.projector import OTHER_PARTS, TEXT_PREFIXES, ProjectorConfig
from pace.llm.models.towers.siglip import SiglipVisionConfig
from pace.naming import shown

TOWERS: dict[str, tuple[type[SiglipVisionConfig], type[LlavaTower | LlavaPixtralTower]]] = {
    "clip_vision_model": (ClipVisionConfig, LlavaClipTower),
    "pixtral": (PixtralVisionConfig, LlavaPixtralTower),
    "siglip_vision_model": (SiglipVisionConfig, LlavaTower),
}
"""model_type of the tower -> its config and class."""


def read_llava_vision(
    raw: dict[str, Any], towers: Collection[str] = TOWERS.keys(), family: str = "Llava"
) -> SiglipVisionConfig:
    """Reads `vision_config`. Raises ValueError or NotImplementedError that names the field, also for a tower that is
    none of `towers`."""
    fields = raw["vision_config"]
    kind = fields.get("model_type", "clip_vision_model") if isinstance(fields, dict) else "clip_vision_model"
    if str(kind) not in towers:
        raise NotImplementedError(
            f"config.json: vision_config.model_type = {shown(kind)} is not implemented for {family}; implemented: "
            f"{', '.join(towers)}"
        )
    return TOWERS[str(kind)][0].read(fields)


@dataclass(frozen=True, kw_only=True)
class TakesImagesConfig(TakesMediaConfig):
    """Fields about images, in addition to those of the text model."""

    vision: SiglipVisionConfig | None = None
    projector: ProjectorConfig | None = None

    beside_text: ClassVar[frozenset[str]] = frozenset(
        {"ignore_index", "image_seq_length", "image_token_id", "image_token_index", "multimodal_projector_bias",
         "projector_hidden_act", "vision_config", "vision_feature_layer", "vision_feature_select_strategy"}
    )  # fmt: skip

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The head is tied if the config or its text part has that flag."""
        fields, text = super().text_part(raw), raw.get("text_config")  # type: ignore[misc]  # a mixin
        if isinstance(text, dict) and text.get("tie_word_embeddings"):
            fields["tie_word_embeddings"] = True
        return fields

    def read_media(self, raw: dict[str, Any]) -> Any:
        vision = read_llava_vision(raw)
        projector = ProjectorConfig.read(raw).between(vision, self)
        if isinstance(vision, PixtralVisionConfig) and projector.vision_feature_select_strategy != "full":
            raise NotImplementedError(
                'config.json: vision_feature_select_strategy = "default" is not implemented for the tower pixtral, '
                "which has no first row to leave out; implemented: full"
            )
        placeholder = read_token_id(raw, ("image_token_index", "image_token_id"), 32000)
        return dataclasses.replace(self, vision=vision, projector=projector, image_token_id=placeholder)


class TakesImages(TakesMedia):
    """A text model that takes images."""

    family = "Llava"
    MediaConfig = TakesImagesConfig
    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES
    other_parts = OTHER_PARTS

    def make_tower(self) -> LlavaTower | LlavaPixtralTower:
        config = self.config
        tower = next(tower for kind, tower in TOWERS.values() if type(config.vision) is kind)
        return tower(config.vision, config.projector, config.image_token_id)


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(TakesImagesConfig, LlamaConfig):
    pass


class LlavaForConditionalGeneration(TakesImages, LlamaForCausalLM):
    Config = LlavaConfig


TakesImages.of_text = {
    "llama": LlavaForConditionalGeneration,
    "gemma": TakesImages.of(GemmaForCausalLM),
    "mistral": TakesImages.of(MistralForCausalLM),
    "phi3": TakesImages.of(Phi3ForCausalLM),
    "qwen2": TakesImages.of(Qwen2ForCausalLM),
    "qwen3": TakesImages.of(Qwen3ForCausalLM),
}
