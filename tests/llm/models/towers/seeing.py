"""Tiny random models that take images, in transformers and here, and the inputs that a processor would make."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pace.llm import LLMModel
from tests.editing import rename_tensors
from tests.llm.models.rotations import mrope
from tests.llm.models.states.hybrid_variants import GATED, MIXTURE
from tests.llm.models.towers.prompts import inputs_of_tokens, prompt_around, together
from tests.llm.models.variants import SIZES, randomise, save_pretrained
from tests.support import backends

NATIVE = "native" in backends()
BACKEND = "native" if NATIVE else "torch"
NEW = 64
"""Tokens to generate."""
IMAGE = 90
"""Id of the placeholder."""
MERGE, PATCH, TEXT_SIZE = 2, 4, SIZES["hidden_size"]
VISION = {"patch_size": PATCH, "num_heads": 2, "out_hidden_size": TEXT_SIZE, "spatial_merge_size": MERGE}
LONG = {"max_position_embeddings": 600, "eos_token_id": None, "pad_token_id": 0}
HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        {**SIZES, **LONG, "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 3, **mrope([2, 2, 2])},
        {
            **VISION, "depth": 4, "hidden_size": 24, "intermediate_size": 40, "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 3],
        },
    ),
    "qwen3_vl_moe": (
        {
            **SIZES, **LONG, "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 3, "num_experts": 6,
            "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1], **mrope([2, 2, 2]),
        },
        {
            **VISION, "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_position_embeddings": 36,
            "deepstack_visual_indexes": [1],
        },
    ),
    "qwen2_vl": (
        {**SIZES, **LONG, "bos_token_id": 1, "num_key_value_heads": 2, **mrope([2, 1, 1])},
        {
            "patch_size": PATCH, "num_heads": 2, "hidden_size": TEXT_SIZE, "spatial_merge_size": MERGE, "depth": 2,
            "embed_dim": 16, "mlp_ratio": 3,
        },
    ),
    "qwen2_5_vl": (
        {**SIZES, **LONG, "bos_token_id": 1, "num_key_value_heads": 2, **mrope([1, 1, 2])},
        {
            **VISION, "depth": 4, "hidden_size": 24, "intermediate_size": 40, "window_size": 3 * MERGE * PATCH,
            "fullatt_block_indexes": [1, 3],
        },
    ),
    "qwen3_5": (
        {**SIZES, **LONG, **GATED, **HYBRID, **mrope([2, 1, 1])},
        {**VISION, "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_position_embeddings": 36},
    ),
    "qwen3_5_moe": (
        {**SIZES, **LONG, **GATED, **MIXTURE, **HYBRID, **mrope([1, 1, 1], partial_rotary_factor=0.5)},
        {**VISION, "depth": 2, "hidden_size": 24, "intermediate_size": 40, "num_position_embeddings": 16},
    ),
}  # fmt: skip
"""Fields of `text_config` and `vision_config`."""


def save_seeing(
    folder: Path,
    model_type: str,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    first_id: int = IMAGE,
) -> torch.nn.Module:
    """Saves a tiny random model in float32, and returns it. `first_id`: id of the placeholder; those of videos, and of
    the tokens before and after an image follow."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    of_text, of_vision = MODELS[model_type]
    names = ("image", "video", "vision_start", "vision_end")
    ids = {f"{name}_token_id": first_id + place for place, name in enumerate(names)}
    config = AutoConfig.for_model(
        model_type, text_config=of_text | (text or {}), vision_config=of_vision | (vision or {}), **ids, pad_token_id=0
    )
    torch.manual_seed(sum(map(ord, model_type)))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, model_type)
    save_pretrained(model, folder)
    return model


def with_other_names(folder: Path) -> None:
    """Renames the tensors of a checkpoint to the other spelling: `visual.*` and `model.*`, or `model.visual.*` and
    `model.language_model.*`."""
    to_new = {"visual.": "model.visual.", "model.": "model.language_model."}
    with safe_open(folder / "model.safetensors", "pt") as file:
        is_new = not any(name.startswith("visual.") for name in file.keys())
    rename_tensors(folder, {new: old for old, new in to_new.items()} if is_new else to_new)


def pixels(grids: list[tuple[int, int]], seed: int) -> Tensor:
    """Random patches of images, whose grids are rows and columns of patches."""
    count = sum(rows * columns for rows, columns in grids)
    return torch.randn(count, 3 * 2 * PATCH**2, generator=torch.Generator().manual_seed(seed))


def grid_thw(grids: list[tuple[int, int]]) -> Tensor:
    return torch.tensor([(1, *grid) for grid in grids]).view(-1, 3)


def inputs_of(rows: list[list[tuple[int, int]]], seed: int = 0) -> dict[str, Tensor]:
    """What a processor makes of a batch of prompts with images. `rows`: the grids of each prompt, which has the tokens
    and patches of `inputs_of([grids], seed + index)`."""
    return together([_one_prompt(grids, seed + index) for index, grids in enumerate(rows)])


def _one_prompt(grids: list[tuple[int, int]], seed: int) -> dict[str, Tensor]:
    images = [[IMAGE] * (rows * columns // MERGE**2) for rows, columns in grids]
    inputs = inputs_of_tokens(prompt_around(images, seed, apart=1))
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    return inputs | ({"pixel_values": pixels(grids, seed), "image_grid_thw": grid_thw(grids)} if grids else {})


def run_to_end(encoding: Generator[None, None, Tensor]) -> Tensor:
    """Runs all slices of a tower, and returns the rows."""
    while True:
        try:
            next(encoding)
        except StopIteration as end:
            return end.value


def results(output: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities."""
    return [
        (tokens, [entry.logprob for entry in entries])
        for tokens, entries in zip(output.generated_token_ids, output.logprobs)
    ]


def load(folder: Path, **options: Any) -> LLMModel:
    return LLMModel(folder, **{"dtype": "float32", "progress": False, "backend": BACKEND, **options})


def run(model: LLMModel, inputs: dict[str, Any], count: int = NEW, **fields: Any) -> list:
    """Tokens and their log-probabilities."""
    return results(model.generate(**inputs, max_new_tokens=count, logprobs=0, **fields))


@torch.no_grad()
def oracle_tokens(oracle: torch.nn.Module, inputs: dict[str, Any], count: int = NEW) -> list[int]:
    """Greedy tokens of the model in transformers."""
    if hasattr(oracle.model, "rope_deltas"):
        oracle.model.rope_deltas = None  # or it has those of the last prompt
        if inputs.keys() <= {"input_ids", "attention_mask", "mm_token_type_ids"}:  # no media
            inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    out = oracle.generate(**inputs, max_new_tokens=count, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()
