"""LLaVA-NeXT: LLaVA 1.6 and Granite Vision. A text model of any of several families, and images as tiles."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.granite import GraniteConfig, GraniteForCausalLM
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.llava import TakesImagesConfig, read_llava_vision
from pace.llm.models.families.mistral import MistralConfig, MistralForCausalLM
from pace.llm.models.families.qwen2 import Qwen2Config, Qwen2ForCausalLM
from pace.llm.models.takes_media import TakesMedia, class_of_text, read_token_id
from pace.llm.models.towers.anyres import AnyresClipTower, AnyresProjectorConfig, AnyresTower
from pace.llm.models.towers.clip import ClipVisionConfig
from pace.llm.models.towers.projector import OTHER_PARTS, TEXT_PREFIXES
from pace.ops.protocol import ForwardOps, Ops

NEWLINE_NAMES = dict.fromkeys(("image_newline", "model.image_newline"), "vision_tower.image_newline")
"""Names of the row after each line of patches, and the name used here."""


@dataclass(frozen=True, kw_only=True)
class TakesAnyresConfig(TakesImagesConfig):
    projector: AnyresProjectorConfig | None = None

    beside_text: ClassVar[frozenset[str]] = TakesImagesConfig.beside_text | {
        "image_grid_pinpoints",
        "use_image_newline_parameter",
    }

    def read_media(self, raw: dict[str, Any]) -> Any:
        vision = read_llava_vision(raw, ("clip_vision_model", "siglip_vision_model"), "LlavaNext")
        projector = AnyresProjectorConfig.read(raw).between(vision, self)
        placeholder = read_token_id(raw, ("image_token_index", "image_token_id"), 32000)
        return dataclasses.replace(self, vision=vision, projector=projector, image_token_id=placeholder)


class TakesAnyres(TakesMedia):
    """A text model that takes images of any size."""

    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES | NEWLINE_NAMES
    other_parts = (*OTHER_PARTS, *NEWLINE_NAMES)

    def __init__(self, config: Any, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        if config.vision is not None:
            tower = AnyresClipTower if isinstance(config.vision, ClipVisionConfig) else AnyresTower
            self.towers = [tower(config.vision, config.projector, config.image_token_id)]

    @classmethod
    def variant(cls, raw: dict[str, Any]) -> type[BaseModelForCausalLM]:
        return class_of_text(raw, OF_TEXT, "LlavaNext")


@dataclass(frozen=True, kw_only=True)
class LlavaNextConfig(TakesAnyresConfig, LlamaConfig):
    pass


class LlavaNextForConditionalGeneration(TakesAnyres, LlamaForCausalLM):
    Config = LlavaNextConfig


@dataclass(frozen=True, kw_only=True)
class LlavaNextOfGraniteConfig(TakesAnyresConfig, GraniteConfig):
    pass


class LlavaNextOfGranite(TakesAnyres, GraniteForCausalLM):
    """Granite Vision."""

    Config = LlavaNextOfGraniteConfig

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        """Rows of images are scaled as embeddings are."""
        x = self.embedding(ops, batch.tokens)
        self._place(ops, batch, x, 0, add=False)
        ops.scale_(x, self.embedding_scale)
        return x


@dataclass(frozen=True, kw_only=True)
class LlavaNextOfMistralConfig(TakesAnyresConfig, MistralConfig):
    pass


class LlavaNextOfMistral(TakesAnyres, MistralForCausalLM):
    Config = LlavaNextOfMistralConfig


@dataclass(frozen=True, kw_only=True)
class LlavaNextOfQwen2Config(TakesAnyresConfig, Qwen2Config):
    pass


class LlavaNextOfQwen2(TakesAnyres, Qwen2ForCausalLM):
    Config = LlavaNextOfQwen2Config


OF_TEXT: dict[str, type[BaseModelForCausalLM]] = {
    "llama": LlavaNextForConditionalGeneration,
    "granite": LlavaNextOfGranite,
    "mistral": LlavaNextOfMistral,
    "qwen2": LlavaNextOfQwen2,
}
"""model_type of the text -> class. The first one is the default."""
