"""Tiny random Gemma 4 models that take images, in transformers and here, and the inputs that a processor would make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.llm.models.families.gemma4_variants import EXPERTS, GEMMA4_BASE, KEYS, LARGE
from tests.llm.models.towers.prompts import inputs_of_tokens, prompt_around, together
from tests.llm.models.variants import SIZES, randomise, save_pretrained

IMAGE, BEGIN, END, SOUND, PAD = 90, 92, 93, 94, 5
"""Ids of the placeholder of images, of the tokens before and after one, of the placeholder of sound, and of padding."""
SAMPLES = 16
"""Samples of a token of sound."""
AUDIO: dict[str, dict[str, Any]] = {
    "12b": {"audio_embed_dim": SAMPLES},
    "e2b": {
        "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "subsampling_conv_channels": [16, 6],
        "attention_chunk_size": 4, "attention_context_left": 6, "output_proj_dims": 20,
    },
}  # fmt: skip
"""Fields of `audio_config`."""
SIDE = 2
"""Side of the square of patches that becomes one token."""
PATCH = 4
P = 160
"""Patches of the arrays of an image; the rest is padding."""
LONG = {"max_position_embeddings": 600, "eos_token_id": None, "pad_token_id": PAD}
VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "pooling_kernel_size": SIDE, "patch_size": PATCH,
    "position_embedding_size": 40, "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "e2b": ("gemma4", {**SIZES, **GEMMA4_BASE["gemma4_text"], **LONG}, VISION | {"use_clipped_linears": True}),
    "26b": (
        "gemma4",
        {**SIZES, **GEMMA4_BASE["gemma4_text"], **LARGE, **KEYS, **EXPERTS, **LONG, "sliding_window": 6,
         "use_bidirectional_attention": "vision"},
        VISION | {"standardize": True},
    ),
    "12b": (
        "gemma4_unified",
        {**SIZES, **GEMMA4_BASE["gemma4_unified_text"], **LONG, "sliding_window": 6,
         "use_bidirectional_attention": "vision"},
        {"patch_size": PATCH, "pooling_kernel_size": SIDE, "mm_embed_dim": 20, "mm_posemb_size": 24,
         "output_proj_dims": 20},
    ),
}  # fmt: skip
"""model_type, fields of `text_config` and of `vision_config`. Images have more tokens than the windows."""


def save_gemma4(
    folder: Path,
    name: str,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    ids: dict[str, int] | None = None,
    audio: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """Saves a tiny random model in float32, and returns it. Fields replace those of `MODELS`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    model_type, of_text, of_vision = MODELS[name]
    ids = {"image_token_id": IMAGE, "video_token_id": 91, "audio_token_id": SOUND, "boi_token_id": BEGIN} | (ids or {})
    config = AutoConfig.for_model(
        model_type, text_config=of_text | (text or {}), vision_config=of_vision | (vision or {}), eoi_token_id=END,
        audio_config=AUDIO[name] | (audio or {}) if name in AUDIO else None, **ids,
    )  # fmt: skip
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, model_type)
    randomise_tower(model)
    save_pretrained(model, folder)
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def randomise_tower(model: torch.nn.Module) -> None:
    """Positions of about the size of patches, limits that some rows reach, and shifts of pooled rows."""
    for name, parameter in model.named_parameters():
        if name.endswith(("position_embedding_table", "pos_embedding")):
            parameter.copy_(parameter.normal_(0.0, 0.5).bfloat16())
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):
            low, high = ((0.5, 1.5), (0.8, 2.0))["input" in name]
            value = torch.empty(()).uniform_(low, high) * (-1 if name.endswith("_min") else 1)
            if ".0." in name and "input" in name:  # all products of a layer have the same, as most checkpoints
                value = torch.tensor(-1.0 if name.endswith("_min") else 1.25)
            if ".1." in name and "gate" in name:
                value = torch.tensor(-torch.inf if name.endswith("_min") else torch.inf)
            buffer.copy_(value.bfloat16())
        if name.endswith(("std_bias", "std_scale")):
            buffer.copy_(buffer.normal_(1.0, 0.3).bfloat16())


def arrays(grids: list[tuple[int, int]], seed: int, merged: bool) -> dict[str, Tensor]:
    """The arrays of images, whose grids are rows and columns of tokens. With `merged`, a token is one patch."""
    side, size = (1, PATCH * SIDE) if merged else (SIDE, PATCH)
    generator, k, count = torch.Generator().manual_seed(seed), 3 * size**2, P // SIDE**2 * side**2
    values = torch.zeros(len(grids), count, k)
    places = torch.full((len(grids), count, 2), -1)
    for image, (rows, columns) in enumerate(grids):
        number = rows * columns * side**2
        values[image, :number] = torch.rand(number, k, generator=generator)
        at = torch.arange(number)
        places[image, :number] = torch.stack([at % (columns * side), at // (columns * side)], 1)
    return {"pixel_values": values, "image_position_ids": places}


def inputs_of(rows: list[list[tuple[int, int]]], name: str, seed: int = 0) -> dict[str, Tensor]:
    """What a processor makes of a batch of prompts with images, padded on the left. `rows`: the grids of each, which
    has the tokens and patches of `inputs_of([grids], name, seed + index)`."""
    return together([_one_prompt(grids, name, seed + index) for index, grids in enumerate(rows)], pad_id=PAD)


def _one_prompt(grids: list[tuple[int, int]], name: str, seed: int) -> dict[str, Tensor]:
    images = [[BEGIN, *[IMAGE] * (rows * columns), END] for rows, columns in grids]
    inputs = inputs_of_tokens(prompt_around(images, seed))
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    return inputs | (arrays(grids, seed, name == "12b") if grids else {})
