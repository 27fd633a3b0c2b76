"""Tiny random Gemma 3 models that take images, in transformers and here, and the inputs that a processor would make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.llm.models.towers.prompts import inputs_of_tokens, prompt_around, together
from tests.llm.models.variants import SIZES, randomise, save_pretrained

IMAGE, BEGIN, END = 90, 92, 93
"""Ids of the placeholder, and of the tokens before and after an image."""
TEXT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 5,
    "query_pre_attn_scalar": 10, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 600, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 24, "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
"""36 patches, and 9 tokens: more than a window has."""
TOKENS = 9


def save_looking(
    folder: Path, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **fields: Any
) -> torch.nn.Module:
    """Saves a tiny random model in float32, and returns it. `fields` are those of the whole config."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    ids = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END, "eos_token_id": None}
    whole = {"mm_tokens_per_image": TOKENS, "tie_word_embeddings": False, **ids, **fields}
    config = Gemma3Config(text_config=TEXT | (text or {}), vision_config=VISION | (vision or {}), **whole)
    torch.manual_seed(11)
    model = Gemma3ForConditionalGeneration(config).eval()
    randomise(model, "gemma3")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision_tower" in name and "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    save_pretrained(model, folder)
    model.generation_config.eos_token_id = None
    return model


PUBLISHED_NAMES = {"vision_tower.": "vision_tower.vision_model."}
"""Prefixes of names that transformers 5 saves, and those on the Hub."""
NEW_NAMES = {
    "vision_tower.vision_model.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "language_model.model.": "model.language_model.",
}
"""Prefixes of names on the Hub, and those of the modules in transformers 5."""


def pixels(count: int, seed: int = 0, side: int = VISION["image_size"]) -> Tensor:
    """Random images."""
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def inputs_of(counts: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """What a processor makes of a batch of prompts with images, padded on the left. The prompt `index` has
    `counts[index]` images, and those of `inputs_of([count], seed + index)`."""
    return together([_one_prompt(count, seed + index) for index, count in enumerate(counts)])


def _one_prompt(count: int, seed: int) -> dict[str, Tensor]:
    inputs = inputs_of_tokens(prompt_around([[BEGIN, *[IMAGE] * TOKENS, END]] * count, seed))
    inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    return inputs | ({"pixel_values": pixels(count, seed)} if count else {})
