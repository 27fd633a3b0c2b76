"""Gemma 3: Gemma 2 with normalised query and key heads instead of capped scores. Five layers with a window alternate
with one without; the two kinds have different rotations. The rows of an image see each other, also those after them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pace.llm.layers import HeadNorm, RopeConfig
from pace.llm.models.families.gemma2 import Gemma2Config, Gemma2ForCausalLM
from pace.llm.models.layer_types import FULL, SLIDING
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, number
from pace.llm.models.rope_config import fields_of_layers, read_rope
from pace.llm.models.takes_media import TakesMedia, TakesMediaConfig, read_token_id
from pace.llm.models.towers.projector import OTHER_PARTS, TEXT_PREFIXES
from pace.llm.models.towers.siglip import Gemma3Tower, Gemma3VisionConfig
from pace.naming import shown

logger = logging.getLogger("pace")


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(TakesMediaConfig, Gemma2Config):
    vocab_size: int = count(262208)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    attn_logit_softcapping: float | None = number(None, 1e-6, 1e9, optional=True)
    final_logit_softcapping: float | None = number(None, 1e-6, 1e9, optional=True)
    sliding_window_pattern: int = count(6, MAX_LAYERS)
    vision: Gemma3VisionConfig | None = None

    without_effect: ClassVar[dict[str, tuple]] = {"attn_logit_softcapping": (None,)}
    also_read: ClassVar[frozenset[str]] = Gemma2Config.also_read | {"rope_local_base_freq"}
    beside_text: ClassVar[frozenset[str]] = frozenset(
        {"vision_config", "mm_tokens_per_image", *(f"{name}_token_{end}" for name in ("boi", "eoi",
         "image") for end in ("id", "index"))}
    )  # fmt: skip

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        fields = super().text_part(raw)
        if raw.get("text_config") is None or fields.get("final_logit_softcapping") is None:
            return fields
        cap = fields.pop("final_logit_softcapping")
        logger.warning(
            (
                "config.json: final_logit_softcapping = %s is ignored, as transformers does for checkpoints that see "
                "images"
            ),
            shown(cap),
        )
        return fields

    def read_media(self, raw: dict[str, Any]) -> Any:
        vision = Gemma3VisionConfig.of_whole(raw, self.hidden_size)
        placeholder = read_token_id(raw, ("image_token_index", "image_token_id"), 262144)
        if vision.pool:
            return replace(self, vision=vision, image_token_id=placeholder)
        # transformers opens such checkpoints, too, and fails for the first image.
        logger.warning(
            "config.json: mm_tokens_per_image = %d is not the square of a part of %d, the patches on a side of an "
            "image; the model takes text only",
            vision.tokens_per_side**2,
            vision.patches_per_side,
        )
        return self

    @property
    def full_every(self) -> int:
        return self.sliding_window_pattern

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        values = super().derived(fields)
        local = fields_of_layers(fields, SLIDING, "rope_local_base_freq", scaled=False)
        return values | {"local_rope": read_rope(local, values["head_dim"], self.max_position_embeddings)}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return read_rope(fields_of_layers(fields, FULL), head_dim, self.max_position_embeddings, default_theta=1e6)

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings


class Gemma3ForConditionalGeneration(TakesMedia, Gemma2ForCausalLM):
    """Gemma 3 with images; `Gemma3ForCausalLM` is the same model without a tower."""

    Config = Gemma3Config
    whole_media = True
    head_norm = True
    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES
    other_parts = OTHER_PARTS
    ignored_tensors = (
        *Gemma2ForCausalLM.ignored_tensors,
        r"vision_tower\.head\..*",
        r"vision_tower\.embeddings\.position_ids",
    )

    def make_tower(self) -> Gemma3Tower:
        return Gemma3Tower(self.config.vision, self.config.image_token_id)

    def make_head_norm(self, name: str, num_heads: int) -> HeadNorm:
        return HeadNorm(name, self.config.head_dim, self.config.rms_norm_eps, offset=1.0)
