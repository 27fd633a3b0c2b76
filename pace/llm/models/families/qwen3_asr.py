"""Qwen3-ASR: Qwen3, which also takes the rows of clips. They have ordinary positions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.models.families.qwen3 import Qwen3Config, Qwen3ForCausalLM
from pace.llm.models.model_config import flag
from pace.llm.models.towers.qwen_audio import Qwen3ASRAudioConfig, Qwen3ASRAudioTower, QwenAudioConfig
from pace.naming import shown
from pace.ops.protocol import ForwardOps, Ops


@dataclass(frozen=True, kw_only=True)
class HearsSoundConfig:
    """Fields about sound, in addition to those of the text model."""

    audio: QwenAudioConfig | None = None
    """The tower; None for only text."""
    audio_token_id: int = 151646
    """Id of the token that stands for a row of a clip."""

    Audio: ClassVar[type[QwenAudioConfig]] = QwenAudioConfig

    def with_media(self, raw: dict[str, Any]) -> Any:
        config = super().with_media(raw)
        try:
            audio = self.Audio.read(raw.get("audio_config"))
            placeholder = raw.get("audio_token_id", self.audio_token_id)
            if type(placeholder) is not int or placeholder < 0:
                raise ValueError(f"config.json: audio_token_id must be a token's id; got {shown(placeholder)}")
            if audio.output_dim != self.hidden_size:
                raise ValueError(
                    f"config.json: audio_config.output_dim must be the text's hidden_size, {self.hidden_size}; "
                    f"got {audio.output_dim}"
                )
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{error}; media=False loads only the text model") from None
        return dataclasses.replace(config, audio=audio, audio_token_id=placeholder)


@dataclass(frozen=True, kw_only=True)
class Qwen3ASRConfig(HearsSoundConfig, Qwen3Config):
    tie_word_embeddings: bool = flag(True)
    audio_token_id: int = 151676

    beside_text: ClassVar[frozenset[str]] = frozenset(
        {"audio_config", "audio_token_id", "timestamp_token_id", "token_classification_bias"}
    )
    Audio: ClassVar[type[QwenAudioConfig]] = Qwen3ASRAudioConfig


class Qwen3ASRForConditionalGeneration(Qwen3ForCausalLM):
    """A text model whose prompts may have clips. Rows of a clip take the place of the embeddings of its
    placeholders."""

    Config = Qwen3ASRConfig
    text_prefixes: ClassVar[dict[str, str]] = {
        "model.language_model.": "model.",
        "model.audio_tower.": "audio_tower.",
        "model.multi_modal_projector.": "audio_tower.projector.",
    }
    other_parts = ("model.audio_tower.", "model.multi_modal_projector.")

    def __init__(self, config: Qwen3ASRConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        if config.audio is not None:
            self.towers = [Qwen3ASRAudioTower(config.audio, config.audio_token_id)]

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        x = super().embed(ops, batch)
        if self.towers and batch.given is not None:
            ops.place_rows_(x, batch.given.rows[:, : self.config.hidden_size], batch.given.at, add=False)
        return x
