"""Qwen3.5, 3.6 and 3.8, dense: the gated delta rule in three of four layers, gated attention in the fourth. Of
checkpoints that take images, only the text part is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import RopeConfig
from pace.llm.models.families.delta_rule import GatedDeltaConfig, GatedDeltaForCausalLM
from pace.llm.models.families.qwen_vl import BESIDE_TEXT, OTHER_PARTS, TEXT_PREFIXES, text_rope
from pace.llm.models.model_config import count


@dataclass(frozen=True, kw_only=True)
class OfQwen3_5Config(GatedDeltaConfig):
    """What the dense models and the mixtures have in common."""

    vocab_size: int = count(248320)

    beside_text: ClassVar[frozenset[str]] = BESIDE_TEXT
    without_effect: ClassVar[dict[str, tuple]] = {"mlp_only_layers": (None, [])}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return text_rope(fields, 1e4, head_dim, self.max_position_embeddings, partial=True, default_partial=0.25)


class OfQwen3_5(GatedDeltaForCausalLM):
    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES
    other_parts = OTHER_PARTS


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(OfQwen3_5Config):
    intermediate_size: int = count(12288)
    num_key_value_heads: int | None = count(4, optional=True)


class Qwen3_5ForConditionalGeneration(OfQwen3_5):
    """Qwen3.5 for text; `Qwen3_5ForCausalLM` is the same model."""

    Config = Qwen3_5Config
