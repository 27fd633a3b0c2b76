"""Tiny random models of LLaVA's kind, in transformers and here, and the inputs that a processor would make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.llm.models.variants import SIZES, randomise, save_pretrained

IMAGE, BREAK, END = 90, 91, 92
"""Ids of the placeholder, and of the tokens after a row and after the last row of Pixtral's images."""
PATCH = 4
TEXT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 3, "max_position_embeddings": 600,
    "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1, "sliding_window": None,
}  # fmt: skip
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 64, "patch_size": PATCH, "hidden_act": "silu",
}  # fmt: skip
SQUARE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 14,
    "patch_size": PATCH,
}  # fmt: skip
"""Fields of CLIP and SigLIP. Patches do not fill the image."""
SIDE = SQUARE["image_size"]
Sizes = list[tuple[int, int]]
"""Rows and columns of tokens of images; for CLIP and SigLIP only their number counts."""


def save_llava(
    folder: Path, model_type: str, text: dict[str, Any], vision: dict[str, Any], **fields: Any
) -> torch.nn.Module:
    """Saves a tiny random model in float32, and returns it. `fields` are those of the whole config."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(
        model_type, text_config=TEXT | text, vision_config=vision, image_token_index=IMAGE, **fields
    )
    torch.manual_seed(12)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, model_type)
    save_pretrained(model, folder)
    model.generation_config.eos_token_id = None
    return model


def rename(folder: Path, published: bool) -> None:
    """Renames the tensors of a checkpoint to those of the Hub, or to those of the modules in transformers 5."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    to_old = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }
    has_inner = any("vision_model." in name or "class_embedding" in name for name in load_file(path))

    def old_name(name: str) -> str:
        old = next((prefix for prefix in to_old if name.startswith(prefix)), "")
        name = to_old.get(old, "") + name.removeprefix(old)
        inner = name.removeprefix("vision_tower.")
        return f"vision_tower.vision_model.{inner}" if has_inner and inner != name and "vision_model" not in inner else name

    def new_name(name: str) -> str:
        name = old_name(name).replace("vision_tower.vision_model.", "vision_tower.")
        new = next(prefix for prefix, old in to_old.items() if name.startswith(old))
        return new + name.removeprefix(to_old[new])

    renamed = old_name if published else new_name
    save_file({renamed(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def pixtral_inputs(sizes: Sizes, unit: int, seed: int) -> dict[str, Tensor]:
    """Random images, padded to the largest one by numbers that count for nothing."""
    pixels = [(rows * unit, columns * unit) for rows, columns in sizes]
    shape = len(sizes), 3, max(height for height, _ in pixels), max(width for _, width in pixels)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": values, "image_sizes": torch.tensor(pixels)}


def square_inputs(sizes: Sizes, seed: int) -> dict[str, Tensor]:
    shape = len(sizes), 3, SIDE, SIDE
    return {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def rows_of_image(rows: int, columns: int) -> list[int]:
    """Tokens of an image of Pixtral."""
    return ([IMAGE] * columns + [BREAK]) * (rows - 1) + [IMAGE] * columns + [END]


def prompt_of(images: list[list[int]], seed: int) -> list[int]:
    """Random text with images in it, the first at the start or not, others next to each other or apart."""
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(2, 89, (length,), generator=generator).tolist()

    tokens = text(seed % 2 * 6)
    for number, image in enumerate(images):
        tokens += image + text(7 * (number % 2))
    return tokens + text(4)


def together(prompts: list[list[int]], images: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One batch of prompts, padded on the left, and of the images of each."""
    width = max(map(len, prompts))
    inputs = {
        "input_ids": torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }
    given = [one for one in images if one]
    if not given:
        return inputs
    values = [one["pixel_values"] for one in given]
    height, right = (max(value.shape[axis] for value in values) for axis in (2, 3))
    fill = [torch.nn.functional.pad(v, (0, right - v.shape[3], 0, height - v.shape[2]), value=7.0) for v in values]
    inputs["pixel_values"] = torch.cat(fill)
    if "image_sizes" in given[0]:
        inputs["image_sizes"] = torch.cat([one["image_sizes"] for one in given])
    return inputs
