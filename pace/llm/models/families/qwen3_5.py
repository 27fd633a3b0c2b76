"""Qwen3.5, 3.6 and 3.8, dense: the gated delta rule in three of four layers, gated attention in the fourth. Most
checkpoints also take images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import RopeConfig
from pace.llm.models.families.delta_rule import GatedDeltaConfig, GatedDeltaForCausalLM
from pace.llm.models.families.qwen_vl import SeesImages, SeesImagesConfig, text_rope
from pace.llm.models.model_config import count
from pace.llm.models.towers.qwen_vision import Qwen3VisionTower
from pace.llm.models.towers.qwen_vision_config import Qwen3_5VisionConfig, QwenVisionConfig


@dataclass(frozen=True, kw_only=True)
class OfQwen3_5Config(SeesImagesConfig, GatedDeltaConfig):
    """What the dense models and the mixtures have in common."""

    vocab_size: int = count(248320)
    image_token_id: int = 248056

    Vision: ClassVar[type[QwenVisionConfig]] = Qwen3_5VisionConfig
    default_sections: ClassVar[tuple[int, int, int]] = (11, 11, 10)
    alternates: ClassVar[bool] = True
    without_effect: ClassVar[dict[str, tuple]] = {"mlp_only_layers": (None, [])}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return text_rope(fields, 1e4, head_dim, self.max_position_embeddings, partial=True, default_partial=0.25)


class OfQwen3_5(SeesImages, GatedDeltaForCausalLM):
    Tower = Qwen3VisionTower


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(OfQwen3_5Config):
    intermediate_size: int = count(12288)
    num_key_value_heads: int | None = count(4, optional=True)


class Qwen3_5ForConditionalGeneration(OfQwen3_5):
    """`Qwen3_5ForCausalLM` is the same model without a tower."""

    Config = Qwen3_5Config
