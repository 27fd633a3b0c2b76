"""Idefics3 and SmolVLM: a text model, most often Llama, which also takes the rows of images."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mistral import MistralForCausalLM
from pace.llm.models.families.qwen2 import Qwen2ForCausalLM
from pace.llm.models.takes_media import TakesMedia, TakesMediaConfig, read_token_id
from pace.llm.models.towers.idefics3 import Idefics3Tower, Idefics3VisionConfig

LEFT_OVER = frozenset(
    """is_llama_config perceiver_config pixel_shuffle_factor qk_layer_norms rope_interleaved transformers.js_config
    use_resampler""".split()
)
"""Fields of the code that trained SmolVLM, which transformers does not read, in `text_config`."""


@dataclass(frozen=True, kw_only=True)
class TakesTilesConfig(TakesMediaConfig):
    """Fields about images, in addition to those of the text model."""

    vision: Idefics3VisionConfig | None = None
    image_token_id: int = 128257

    beside_text: ClassVar[frozenset[str]] = frozenset({"image_token_id", "scale_factor", "vision_config"})

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The text's fields. `tie_word_embeddings` counts only at the top level, and the other fields in
        `text_config`."""
        text = raw.get("text_config")
        if not isinstance(text, dict):
            return super().text_part(raw)
        text = {name: value for name, value in text.items() if name not in LEFT_OVER}
        whole = {name: value for name, value in raw.items() if name not in ("pad_token_id", "vocab_size")}
        tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", False)}
        return super().text_part(whole | {"text_config": text} | tied)

    def read_media(self, raw: dict[str, Any]) -> Any:
        vision, placeholder = Idefics3VisionConfig.of(raw), read_token_id(raw, ("image_token_id",), 128257)
        return dataclasses.replace(self, vision=vision, image_token_id=placeholder)


class TakesTiles(TakesMedia):
    """A text model that takes images as tiles."""

    family = "Idefics3"
    MediaConfig = TakesTilesConfig
    text_prefixes: ClassVar[dict[str, str]] = {
        "model.text_model.": "model.",
        "text_model.": "model.",
        "model.vision_model.": "vision_tower.",
        "vision_model.": "vision_tower.",
        "model.connector.": "vision_tower.connector.",
        "connector.": "vision_tower.connector.",
    }
    other_parts = ("model.vision_model.", "model.connector.", "vision_model.", "connector.")

    def make_tower(self) -> Idefics3Tower:
        config = self.config
        return Idefics3Tower(config.vision, config.hidden_size, config.image_token_id)


@dataclass(frozen=True, kw_only=True)
class Idefics3Config(TakesTilesConfig, LlamaConfig):
    pass


class Idefics3ForConditionalGeneration(TakesTiles, LlamaForCausalLM):
    Config = Idefics3Config


TakesTiles.of_text = {
    "llama": Idefics3ForConditionalGeneration,
    "mistral": TakesTiles.of(MistralForCausalLM),
    "qwen2": TakesTiles.of(Qwen2ForCausalLM),
}
