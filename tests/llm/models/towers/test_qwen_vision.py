"""Rows of the vision towers are those of transformers, and have the same bits as a program and op by op."""

from __future__ import annotations

import json

import pytest
import torch

from pace.llm.models.model_list import read_config
from pace.llm.runners import EagerRunner, ProgramRunner
from tests.llm.models.towers.seeing import MODELS, grid_thw, pixels, run_to_end, save_seeing, with_other_names
from tests.support import TensorDict, backend, backends

pytest.importorskip("transformers")

GRIDS = [(2, 2), (6, 10), (4, 2), (14, 8)]
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


def load(folder, ops: str, dtype: torch.dtype = torch.float32):
    from safetensors.torch import load_file

    model_class, config = read_config(json.loads((folder / "config.json").read_text()), media=True)
    model = model_class(config, dtype, backend(ops))
    model.load_weights(TensorDict(load_file(folder / "model.safetensors")))
    return model


def rows_of(runner, grids, seed: int = 0) -> list[torch.Tensor]:
    inputs = {"pixel_values": pixels(grids, seed), "image_grid_thw": grid_thw(grids)}
    return [run_to_end(runner.encode(media)) for media in runner.towers[0].read_inputs(inputs)]


@torch.no_grad()
def oracle_rows(oracle, grids, seed: int = 0) -> list[torch.Tensor]:
    patches = pixels(grids, seed).to(oracle.dtype)
    out = oracle.model.get_image_features(patches, grid_thw(grids), return_dict=True)
    parts = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
    return [torch.cat(of_image, 1) for of_image in zip(*parts)]


@pytest.mark.parametrize("names", ["saved", "other"])
@pytest.mark.parametrize("model_type, fields", VARIANTS)
def test_rows_are_those_of_transformers(model_type, fields, names, tmp_path) -> None:
    oracle = save_seeing(tmp_path, model_type, vision=fields)
    if names == "other":
        with_other_names(tmp_path)
    expected = oracle_rows(oracle, GRIDS)
    for ops in backends():
        model = load(tmp_path, ops)
        ours = rows_of(EagerRunner(model), GRIDS)
        for found, wanted in zip(ours, expected, strict=True):
            assert found.shape == wanted.shape == (len(wanted), model.towers[0].width)
            assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert len({found.std().item() for found in ours}) == len(GRIDS) and ours[1].std() > 0.1
        if ops == "native":
            program = ProgramRunner(model)
            for image, found in enumerate(rows_of(program, GRIDS)):
                assert torch.equal(found, ours[image]), "the bits of single operations"
            for image in (3, 0):
                pixel = pixels(GRIDS, 0).split([rows * columns for rows, columns in GRIDS])[image]
                (alone,) = program.towers[0].read_inputs(
                    {"pixel_values": pixel, "image_grid_thw": grid_thw([GRIDS[image]])}
                )
                assert torch.equal(run_to_end(program.encode(alone)), ours[image]), "whatever was encoded before"


@pytest.mark.parametrize("model_type", MODELS)
def test_bfloat16_rows_are_as_near_as_those_of_transformers(model_type, tmp_path) -> None:
    """Weights in bfloat16 are the same numbers, and activations are float32 here."""
    from transformers import AutoModelForImageTextToText

    exact = oracle_rows(save_seeing(tmp_path, model_type), GRIDS)
    usual = oracle_rows(AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16).eval(), GRIDS)
    for ops in backends():
        for ours, theirs, wanted in zip(rows_of(EagerRunner(load(tmp_path, ops, torch.bfloat16)), GRIDS), usual, exact):
            assert (ours - wanted).square().mean() <= (theirs.float() - wanted).square().mean()
