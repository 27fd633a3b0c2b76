"""Tiny random Gemma 3 models that take images, in transformers and here, and the inputs that a processor would make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


def with_published_names(folder: Path) -> None:
    """Renames the tensors of a checkpoint to those of the Hub."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    prefixes = {
        "model.vision_tower.vision_model.": "vision_tower.vision_model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "vision_tower.vision_model.": "vision_tower.vision_model.",
        "vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.language_model.": "language_model.model.",
    }

    def renamed(name: str) -> str:
        old = next((old for old in prefixes if name.startswith(old)), "")
        return prefixes.get(old, "") + name.removeprefix(old)

    save_file({renamed(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def with_new_names(folder: Path) -> None:
    """Renames the tensors of a checkpoint to those of the modules in transformers 5."""
    from safetensors.torch import load_file, save_file

    with_published_names(folder)
    path = folder / "model.safetensors"
    prefixes = {
        "vision_tower.vision_model.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "language_model.model.": "model.language_model.",
    }

    def renamed(name: str) -> str:
        old = next((old for old in prefixes if name.startswith(old)), "")
        return prefixes.get(old, "") + name.removeprefix(old)

    save_file({renamed(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def pixels(count: int, seed: int = 0, side: int = VISION["image_size"]) -> Tensor:
    """Random images."""
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def prompt_of(count: int, seed: int) -> list[int]:
    """Random text with `count` images in it, the first at the start or not, others next to each other or apart."""
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(2, 89, (length,), generator=generator).tolist()

    tokens = text(seed % 2 * 6)
    for number in range(count):
        tokens += [BEGIN, *[IMAGE] * TOKENS, END, *text(7 * (number % 2))]
    return tokens + text(4)


def inputs_of(counts: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """What a processor makes of a batch of prompts with images, padded on the left. The prompt `index` has
    `counts[index]` images, and those of `inputs_of([count], seed + index)`."""
    prompts = [prompt_of(count, seed + index) for index, count in enumerate(counts)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": (ids == IMAGE).long()}
    if sum(counts):
        inputs["pixel_values"] = torch.cat([pixels(count, seed + index) for index, count in enumerate(counts)])
    return inputs
