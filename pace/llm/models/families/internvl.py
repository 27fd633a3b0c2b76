"""InternVL as transformers converts it (`-hf`): a text model of one of several kinds, which also takes the rows of
images. Models as published are read as these (`families/internvl_chat.py`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.gpt_oss import GptOssForCausalLM
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.phi3 import Phi3ForCausalLM
from pace.llm.models.families.qwen2 import Qwen2Config, Qwen2ForCausalLM
from pace.llm.models.families.qwen3 import Qwen3ForCausalLM
from pace.llm.models.families.qwen3_moe import Qwen3MoeForCausalLM
from pace.llm.models.takes_media import UNKNOWN_ID, TakesMedia, TakesMediaConfig, read_token_id
from pace.llm.models.towers.internvl import InternVLTower
from pace.llm.models.towers.internvl_config import ChatFields, InternVLVisionConfig, read_internvl_vision

IMAGE_TOKEN_ID = 151667


@dataclass(frozen=True, kw_only=True)
class OfInternVLConfig(TakesMediaConfig):
    """Fields about images, in addition to those of the text model."""

    vision: InternVLVisionConfig | None = None
    image_token_id: int = IMAGE_TOKEN_ID

    beside_text: ClassVar[frozenset[str]] = frozenset(
        """vision_config hidden_size image_token_id image_seq_length downsample_ratio projector_hidden_act
        vision_feature_layer vision_feature_select_strategy image_fold pad2square select_layer system_message template
        use_backbone_lora use_llm_lora""".split()
    ) | {field.name for field in dataclasses.fields(ChatFields)}

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The fields about text. That the head is tied is read outside of `text_config`, and is the default there."""
        fields = super().text_part(raw)  # type: ignore[misc]  # a mixin
        return fields | {"tie_word_embeddings": raw.get("tie_word_embeddings", True)}

    def read_media(self, raw: dict[str, Any]) -> Any:
        vision = read_internvl_vision(raw)
        default = UNKNOWN_ID if vision.joined_qkv else IMAGE_TOKEN_ID
        return dataclasses.replace(self, vision=vision, image_token_id=read_token_id(raw, ("image_token_id",), default))


class OfInternVL(TakesMedia):
    """A text model that takes images as tiles."""

    family = "InternVL"
    MediaConfig = OfInternVLConfig
    ignored_tensors = (*TakesMedia.ignored_tensors, r"vision_tower\.embeddings\.mask_token")
    text_prefixes: ClassVar[dict[str, str]] = {
        "language_model.lm_head.": "lm_head.",
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "vision_tower.projector.",
        "multi_modal_projector.": "vision_tower.projector.",
        "mlp1.0.": "vision_tower.projector.layer_norm.",
        "mlp1.1.": "vision_tower.projector.linear_1.",
        "mlp1.3.": "vision_tower.projector.linear_2.",
        "vision_model.": "vision_tower.",
    }
    other_names: ClassVar[dict[str, str]] = {
        r"^(vision_tower\.embeddings)\.class_embedding$": r"\1.cls_token",
        r"^(vision_tower\.embeddings\.position_embedding)$": r"\1s",
        r"^(vision_tower\.embeddings)\.patch_embedding\.": r"\1.patch_embeddings.projection.",
        r"^(vision_tower\.encoder)\.layers\.": r"\1.layer.",
        r"^(vision_tower\.encoder\.layer\.\d+)\.attn\.proj\.": r"\1.attention.projection_layer.",
        r"^(vision_tower\.encoder\.layer\.\d+)\.attn\.": r"\1.attention.",
        r"^(vision_tower\.encoder\.layer\.\d+)\.norm1\.": r"\1.layernorm_before.",
        r"^(vision_tower\.encoder\.layer\.\d+)\.norm2\.": r"\1.layernorm_after.",
        r"^(vision_tower\.encoder\.layer\.\d+)\.ls([12])$": r"\1.lambda_\2",
    }
    """Names in checkpoints of InternVLChatModel, and those of transformers."""
    other_parts = (
        *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
        *("vision_model.", "mlp1."),
    )

    def make_tower(self) -> InternVLTower:
        config = self.config
        return InternVLTower(config.vision, config.hidden_size, config.image_token_id)


@dataclass(frozen=True, kw_only=True)
class InternVLConfig(OfInternVLConfig, Qwen2Config):
    pass


class InternVLForConditionalGeneration(OfInternVL, Qwen2ForCausalLM):
    Config = InternVLConfig


OfInternVL.of_text = {
    "qwen2": InternVLForConditionalGeneration,
    "qwen3": OfInternVL.of(Qwen3ForCausalLM),
    "qwen3_moe": OfInternVL.of(Qwen3MoeForCausalLM),
    "llama": OfInternVL.of(LlamaForCausalLM),
    "phi3": OfInternVL.of(Phi3ForCausalLM),
    "gpt_oss": OfInternVL.of(GptOssForCausalLM),
}
