"""Tiny random thinkers of Qwen3-Omni, in transformers and here, and the inputs that a processor would make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.llm.processors.qwen_audio import num_tokens
from tests.editing import edit_tensors
from tests.llm.models.towers import hearing
from tests.llm.models.towers.prompts import inputs_of_tokens, prompt_around
from tests.llm.models.towers.seeing import MERGE, MODELS, grid_thw, pixels
from tests.llm.models.variants import randomise, save_pretrained

IMAGE, VIDEO, IMAGE_START, IMAGE_END, SOUND_START, SOUND_END, CLIP = range(90, 97)
"""Ids of placeholders, and of the tokens before and after them."""
TEXT, VISION = MODELS["qwen3_vl_moe"]
VISION = {**VISION, "deepstack_visual_indexes": [0, 2]}
IDS: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": IMAGE_START,
    "vision_end_token_id": IMAGE_END, "audio_start_token_id": SOUND_START, "audio_end_token_id": SOUND_END,
    "audio_token_id": CLIP,
}  # fmt: skip

Medium = tuple[int, int] | int
"""Rows and columns of an image's patches, or the frames of a clip."""


def make_config(text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> Any:
    """The config of transformers, without the parts that speak."""
    from transformers import Qwen3OmniMoeConfig

    of_text, of_vision = TEXT | (text or {}), VISION | (vision or {})
    parts = {"text_config": of_text, "vision_config": of_vision, "audio_config": hearing.AUDIO}
    return Qwen3OmniMoeConfig(thinker_config=parts | IDS, enable_audio_output=False)


def save_omni(
    folder: Path, text: dict[str, Any] | None = None, alone: bool = False, vision: dict[str, Any] | None = None
) -> torch.nn.Module:
    """Saves a tiny random Qwen3-Omni in float32, or its thinker `alone`, and returns the thinker."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    torch.manual_seed(3)
    model = Qwen3OmniMoeForConditionalGeneration(make_config(text, vision)).eval()
    randomise(model, "qwen3_omni_moe")
    hearing.randomise_convolutions(model.thinker.model.audio_tower)
    save_pretrained(model.thinker if alone else model, folder)
    return model.thinker


def add_speaking_parts(folder: Path) -> None:
    """Adds tensors of the parts that speak to a checkpoint."""
    with edit_tensors(folder) as state:
        state["talker.model.layers.0.mlp.gate.weight"] = torch.randn(2, 8)
        state["code2wav.decoder.0.conv.weight"] = torch.ones(3)


def inputs_of(media: list[Medium], seed: int = 0) -> dict[str, Tensor]:
    """What a processor makes of one prompt with images and clips, the first at its start or after some text."""
    placeholders = [
        [SOUND_START, *[CLIP] * num_tokens(medium), SOUND_END]
        if isinstance(medium, int)
        else [IMAGE_START, *[IMAGE] * (medium[0] * medium[1] // MERGE**2), IMAGE_END]
        for medium in media
    ]
    inputs = inputs_of_tokens(prompt_around(placeholders, seed))
    if grids := [medium for medium in media if not isinstance(medium, int)]:
        inputs |= {"pixel_values": pixels(grids, seed), "image_grid_thw": grid_thw(grids)}
    if frames := [medium for medium in media if isinstance(medium, int)]:
        clips = hearing.features(frames, seed)
        inputs |= {
            "input_features": clips["input_features"],
            "feature_attention_mask": clips["input_features_mask"],
        }
    return inputs
