"""The text part of Kimi K2.5 and K2.6: DeepSeek-V3, in checkpoints that also take images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from pace.llm.models.model_config import flag


@dataclass(frozen=True, kw_only=True)
class KimiK25Config(DeepseekV3Config):
    tie_word_embeddings: bool = flag(True)
    """The default of the whole, which counts for its head. Published checkpoints state false."""

    beside_text: ClassVar[frozenset[str]] = frozenset(
        """ignore_index image_token_id media_placeholder_token_id projection_hidden_size projection_layer_norm_eps
        use_unified_vision_chunk video_placeholder video_token_id vision_config vision_end_token_id
        vision_start_token_id""".split()
    )


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
    Config = KimiK25Config
    text_prefixes: ClassVar[dict[str, str]] = {
        "language_model.lm_head.": "lm_head.",
        "language_model.model.": "model.",
        "model.language_model.": "model.",
    }
    # transformers 5 saves the layers of the text with the word for those of images.
    other_names: ClassVar[dict[str, str]] = {r"^model\.blocks\.": "model.layers."}
    other_parts = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")
