"""LLaVA: a text model of any of several families, and a tower. LLaVA 1.5 and BakLLaVA have CLIP, Pixtral its own tower,
and others SigLIP."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.gemma import GemmaConfig, GemmaForCausalLM
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mistral import MistralConfig, MistralForCausalLM
from pace.llm.models.families.phi3 import Phi3Config, Phi3ForCausalLM
from pace.llm.models.families.qwen2 import Qwen2Config, Qwen2ForCausalLM
from pace.llm.models.families.qwen3 import Qwen3Config, Qwen3ForCausalLM
from pace.llm.models.takes_media import TakesMedia, TakesMediaConfig, class_of_text, read_token_id
from pace.llm.models.towers.clip import ClipVisionConfig, LlavaClipTower, LlavaTower
from pace.llm.models.towers.pixtral import LlavaPixtralTower, PixtralVisionConfig
from pace.llm.models.towers.projector import OTHER_PARTS, TEXT_PREFIXES, ProjectorConfig
from pace.llm.models.towers.siglip import SiglipVisionConfig
from pace.naming import shown
from pace.ops.protocol import Ops

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

    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES
    other_parts = OTHER_PARTS

    def __init__(self, config: Any, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        if config.vision is not None:
            tower = next(tower for kind, tower in TOWERS.values() if type(config.vision) is kind)
            self.towers = [tower(config.vision, config.projector, config.image_token_id)]

    @classmethod
    def variant(cls, raw: dict[str, Any]) -> type[BaseModelForCausalLM]:
        return class_of_text(raw, OF_TEXT, "Llava")


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(TakesImagesConfig, LlamaConfig):
    pass


class LlavaForConditionalGeneration(TakesImages, LlamaForCausalLM):
    Config = LlavaConfig


@dataclass(frozen=True, kw_only=True)
class LlavaOfGemmaConfig(TakesImagesConfig, GemmaConfig):
    pass


class LlavaOfGemma(TakesImages, GemmaForCausalLM):
    Config = LlavaOfGemmaConfig


@dataclass(frozen=True, kw_only=True)
class LlavaOfMistralConfig(TakesImagesConfig, MistralConfig):
    pass


class LlavaOfMistral(TakesImages, MistralForCausalLM):
    Config = LlavaOfMistralConfig


@dataclass(frozen=True, kw_only=True)
class LlavaOfPhi3Config(TakesImagesConfig, Phi3Config):
    pass


class LlavaOfPhi3(TakesImages, Phi3ForCausalLM):
    Config = LlavaOfPhi3Config


@dataclass(frozen=True, kw_only=True)
class LlavaOfQwen2Config(TakesImagesConfig, Qwen2Config):
    pass


class LlavaOfQwen2(TakesImages, Qwen2ForCausalLM):
    Config = LlavaOfQwen2Config


@dataclass(frozen=True, kw_only=True)
class LlavaOfQwen3Config(TakesImagesConfig, Qwen3Config):
    pass


class LlavaOfQwen3(TakesImages, Qwen3ForCausalLM):
    Config = LlavaOfQwen3Config


OF_TEXT: dict[str, type[BaseModelForCausalLM]] = {
    "llama": LlavaForConditionalGeneration,
    "gemma": LlavaOfGemma,
    "mistral": LlavaOfMistral,
    "phi3": LlavaOfPhi3,
    "qwen2": LlavaOfQwen2,
    "qwen3": LlavaOfQwen3,
}
"""model_type of the text -> class. The first one is the default."""
