"""LLaVA-NeXT: LLaVA 1.6 and Granite Vision. A text model of any of several families, and images as tiles."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.models.families.granite import GraniteConfig, GraniteForCausalLM
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.llava import TakesImagesConfig, read_llava_vision
from pace.llm.models.families.mistral import MistralForCausalLM
from pace.llm.models.families.qwen2 import Qwen2ForCausalLM
from pace.llm.models.takes_media import TakesMedia, read_token_id
from pace.llm.models.towers.anyres import AnyresClipTower, AnyresProjectorConfig, AnyresTower
from pace.llm.models.towers.clip import ClipVisionConfig
from pace.llm.models.towers.projector import OTHER_PARTS, TEXT_PREFIXES
from pace.ops.protocol import ForwardOps

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

    family = "LlavaNext"
    MediaConfig = TakesAnyresConfig
    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES | NEWLINE_NAMES
    other_parts = (*OTHER_PARTS, *NEWLINE_NAMES)

    def make_tower(self) -> AnyresTower | AnyresClipTower:
        config = self.config
        tower = AnyresClipTower if isinstance(config.vision, ClipVisionConfig) else AnyresTower
        return tower(config.vision, config.projector, config.image_token_id)


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


TakesAnyres.of_text = {
    "llama": LlavaNextForConditionalGeneration,
    "granite": LlavaNextOfGranite,
    "mistral": TakesAnyres.of(MistralForCausalLM),
    "qwen2": TakesAnyres.of(Qwen2ForCausalLM),
}
