"""Qwen3-Omni (30B-A3B): its thinker, Qwen3-MoE that also takes the rows of images and sound.

The thinker is a part of the checkpoint, under `thinker_config` in config.json, or a checkpoint of its own. The parts
that speak are left out. Sound has ordinary positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.llm.layers import RopeConfig
from pace.llm.models.families.qwen3_asr import HearsSoundConfig
from pace.llm.models.families.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from pace.llm.models.families.qwen_vl import BESIDE_TEXT, OfQwen3VLConfig, SeesImages, text_rope
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag
from pace.llm.models.towers.qwen_audio import QwenAudioTower
from pace.llm.models.towers.qwen_vision import Qwen3VisionTower
from pace.naming import shown
from pace.ops.protocol import Ops

OTHER_SPELLINGS = ("audio_token_index", "image_token_index")
"""Fields of Qwen2.5-Omni, which transformers ignores for Qwen3-Omni."""


def thinker_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a config.json about the thinker, with the quantisation of the whole checkpoint."""
    if "thinker_config" not in raw:
        return raw
    thinker = raw["thinker_config"]
    if not isinstance(thinker, dict):
        raise ValueError(f"config.json: thinker_config must be an object; got {shown(thinker)}")
    return thinker | {name: raw[name] for name in ("quantization_config", "compression_config") if raw.get(name)}


@dataclass(frozen=True, kw_only=True)
class Qwen3OmniMoeConfig(HearsSoundConfig, OfQwen3VLConfig, Qwen3MoeConfig):
    vocab_size: int = count(3584)
    intermediate_size: int = count(18944)
    num_hidden_layers: int = count(28, MAX_LAYERS)
    num_attention_heads: int = count(28)
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    norm_topk_prob: bool = flag(True)
    use_sliding_window: bool = flag(True)
    sliding_window: int | None = count(None, MAX_POSITIONS, optional=True)

    beside_text: ClassVar[frozenset[str]] = BESIDE_TEXT | {
        "audio_config", "audio_token_id", "audio_start_token_id", "audio_end_token_id", "user_token_id",
        "position_id_per_seconds", "seconds_per_chunk", *OTHER_SPELLINGS,
    }  # fmt: skip

    without_effect: ClassVar[dict[str, tuple]] = {"use_qk_norm": (None, True)}

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return super().text_part(thinker_of(raw))

    def check(self) -> None:
        super().check()
        if self.effective_window is not None:
            raise NotImplementedError(
                f"config.json: sliding_window = {self.sliding_window} is not implemented for Qwen3OmniMoe; "
                "implemented: null"
            )

    def with_media(self, raw: dict[str, Any]) -> Any:
        thinker = thinker_of(raw)
        for name in OTHER_SPELLINGS:
            if name in thinker:
                raise NotImplementedError(
                    f"config.json: {name} is not implemented; write {name.removesuffix('index')}id; media=False loads "
                    f"only the text model"
                )
        if thinker.get("vision_config") is None:
            raise ValueError("config.json: vision_config is missing; media=False loads only the text model")
        return super().with_media(thinker)

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return text_rope(fields, 1e6, head_dim, self.max_position_embeddings)


class Qwen3OmniMoeForConditionalGeneration(SeesImages, Qwen3MoeForCausalLM):
    Config = Qwen3OmniMoeConfig
    Tower = Qwen3VisionTower
    text_prefixes: ClassVar[dict[str, str]] = {"thinker.": ""}
    other_names: ClassVar[dict[str, str]] = {
        r"visual\.merger_list\.": "visual.deepstack_merger_list.",
        r"(visual\.\w*merger\w*\.(?:\d+\.)?)ln_q\.": r"\1norm.",
        r"(visual\.\w*merger\w*\.(?:\d+\.)?)mlp\.0\.": r"\1linear_fc1.",
        r"(visual\.\w*merger\w*\.(?:\d+\.)?)mlp\.2\.": r"\1linear_fc2.",
    }
    other_parts = (
        "talker.",
        "code2wav.",
        *(f"{part}{tower}" for part in ("", "thinker.") for tower in ("visual.", "audio_tower.")),
    )

    def __init__(self, config: Any, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        if config.audio is not None:
            self.towers.append(QwenAudioTower(config.audio, config.audio_token_id))
