"""Tiny random models that take sound, in transformers and here, and the inputs that a processor would make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.llm.processors.qwen_audio import num_tokens
from tests.llm.models.towers.prompts import inputs_of_tokens, prompt_around
from tests.llm.models.variants import SIZES, randomise, save_pretrained

CLIP = 90
"""Id of the placeholder."""
MELS = 20
AUDIO: dict[str, Any] = {
    "num_mel_bins": MELS, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 24, "d_model": 32,
    "downsample_hidden_size": 6, "output_dim": SIZES["hidden_size"], "n_window": 50, "n_window_infer": 200,
}  # fmt: skip
"""Fields of `audio_config`."""
TEXT: dict[str, Any] = {
    **SIZES, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 600,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def save_hearing(folder: Path, audio: dict[str, Any] | None = None) -> torch.nn.Module:
    """Saves a tiny random Qwen3-ASR in float32, and returns it."""
    from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

    of_audio = AUDIO | (audio or {}) | {"model_type": "qwen3_asr_encoder"}
    ids = {"audio_token_id": CLIP, "pad_token_id": 0, "eos_token_id": 1000, "tie_word_embeddings": False}
    config = Qwen3ASRConfig(audio_config=of_audio, text_config=TEXT, **ids)
    torch.manual_seed(7)
    model = Qwen3ASRForConditionalGeneration(config).eval()
    randomise(model, "qwen3_asr")
    randomise_convolutions(model.model.audio_tower)
    save_pretrained(model, folder)
    return model


def randomise_convolutions(tower: torch.nn.Module) -> None:
    """Makes outputs of convolutions, sums of all inputs, as large as those of matrices."""
    with torch.no_grad():
        for number in (1, 2, 3):
            weight = getattr(tower, f"conv2d{number}").weight
            weight.normal_(0.0, 1.5 / weight[0].numel() ** 0.5)


def features(frames: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Random spectrograms of clips in the arrays of Qwen3-ASR's processor."""
    width = -(-max(frames) // 100) * 100
    mask = (torch.arange(width) < torch.tensor(frames)[:, None]).int()
    values = torch.randn(len(frames), MELS, width, generator=torch.Generator().manual_seed(seed))
    return {"input_features": values * mask[:, None], "input_features_mask": mask}


def inputs_of(frames: list[int], seed: int = 0) -> dict[str, Tensor]:
    """What a processor makes of one prompt with clips, the first at its start or after some text."""
    inputs = inputs_of_tokens(prompt_around([[CLIP] * num_tokens(length) for length in frames], seed, apart=1))
    return inputs | (features(frames, seed) if frames else {})
