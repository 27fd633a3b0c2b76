"""The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3. Their rotation uses three positions (time,
height and width), which are equal for every text token."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import RopeConfig
from pace.llm.models.families.qwen2 import Qwen2Config, Qwen2ForCausalLM
from pace.llm.models.families.qwen3 import Qwen3Config, Qwen3ForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, number, token_ids
from pace.llm.models.rope_config import read_rope

logger = logging.getLogger("pace")

BESIDE_TEXT = frozenset(
    {
        "vision_config",
        "vision_token_id",
        *(f"{name}_token_id" for name in ("image", "video", "vision_start", "vision_end")),
    }
)
TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model."}
OTHER_PARTS = ("visual.", "model.visual.")


def text_rope(fields: dict[str, Any], default_theta: float, head_dim: int, max_positions: int) -> RopeConfig:
    """The rotation of text. It does not depend on how frequencies are distributed over the three positions."""
    fields = dict(fields)
    for source in ("rope_scaling", "rope_parameters"):
        if isinstance(values := fields.get(source), dict):
            fields[source] = {
                name: value for name, value in values.items() if name not in ("mrope_section", "mrope_interleaved")
            }
    return read_rope(fields, head_dim, max_positions, kind_names={"mrope": "default"}, default_theta=default_theta)


@dataclass(frozen=True, kw_only=True)
class Qwen2_5_VLConfig(Qwen2Config):
    vocab_size: int = count(152064)
    hidden_size: int = count(8192)
    intermediate_size: int = count(29568)
    num_hidden_layers: int = count(80, MAX_LAYERS)
    num_attention_heads: int = count(64)
    num_key_value_heads: int | None = count(8, optional=True)
    max_window_layers: int = count(80, MAX_POSITIONS, minimum=0)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(151643)
    eos_token_id: int | tuple[int, ...] | None = token_ids(151645)

    beside_text: ClassVar[frozenset[str]] = BESIDE_TEXT

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return text_rope(fields, 1e6, head_dim, self.max_position_embeddings)


class Qwen2_5_VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2.5-VL for text; `Qwen2VLForConditionalGeneration` is the same model."""

    Config = Qwen2_5_VLConfig
    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES
    other_parts = OTHER_PARTS


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(Qwen3Config):
    hidden_size: int = count(4096)
    max_position_embeddings: int = count(128000, MAX_POSITIONS)

    beside_text: ClassVar[frozenset[str]] = BESIDE_TEXT

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return text_rope(fields, 5e5, head_dim, self.max_position_embeddings)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        if any(super(Qwen3VLConfig, self).window(layer) for layer in range(self.num_hidden_layers)):
            logger.warning("config.json: sliding_window is ignored, as transformers does for Qwen3VL")
        return super().derived(fields)

    def window(self, layer: int) -> None:
        return None


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    Config = Qwen3VLConfig
    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES
    other_parts = OTHER_PARTS
