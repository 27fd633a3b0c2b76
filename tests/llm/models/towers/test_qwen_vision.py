"""Rows of the vision towers are those of transformers, and have the same bits as a program and op by op."""

from __future__ import annotations

import pytest
import torch

from tests.llm.models.towers.checks import check_bfloat16_rows, check_rows
from tests.llm.models.towers.seeing import MODELS, grid_thw, pixels, save_seeing, with_other_names

pytest.importorskip("transformers")

GRIDS = [(2, 2), (6, 10), (4, 2), (14, 8)]
INPUTS = {"pixel_values": pixels(GRIDS, 0), "image_grid_thw": grid_thw(GRIDS)}
VARIANTS = [
    ("qwen3_vl", {}),
    ("qwen3_vl", {"deepstack_visual_indexes": [], "num_position_embeddings": 9, "spatial_merge_size": 1}),
    ("qwen3_vl", {"deepstack_visual_indexes": [2, 1], "temporal_patch_size": 2, "num_heads": 3, "depth": 3}),
    ("qwen3_vl_moe", {}),
    ("qwen2_vl", {}),
    ("qwen3_5", {}),
    ("qwen3_5_moe", {"num_heads": 3, "spatial_merge_size": 1, "depth": 3}),
    ("qwen2_5_vl", {}),
    ("qwen2_5_vl", {"fullatt_block_indexes": [], "window_size": 20, "depth": 2}),
    ("qwen2_5_vl", {"fullatt_block_indexes": [0, 1, 2, 3, 9], "spatial_merge_size": 1, "hidden_act": "gelu"}),
]


@torch.no_grad()
def rows_and_deepstack(oracle, inputs) -> list[torch.Tensor]:
    given = inputs | {"pixel_values": inputs["pixel_values"].to(oracle.dtype)}
    out = oracle.model.get_image_features(**given, return_dict=True)
    parts = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
    return [torch.cat(of_image, 1) for of_image in zip(*parts)]


@pytest.mark.parametrize("names", ["saved", "other"])
@pytest.mark.parametrize("model_type, fields", VARIANTS)
def test_rows_are_those_of_transformers(model_type, fields, names, tmp_path) -> None:
    oracle = save_seeing(tmp_path, model_type, vision=fields)
    if names == "other":
        with_other_names(tmp_path)
    check_rows(tmp_path, INPUTS, rows_and_deepstack(oracle, INPUTS))


@pytest.mark.parametrize("model_type", MODELS)
def test_bfloat16_rows_are_as_near_as_those_of_transformers(model_type, tmp_path) -> None:
    check_bfloat16_rows(tmp_path, INPUTS, save_seeing(tmp_path, model_type), rows_and_deepstack)
