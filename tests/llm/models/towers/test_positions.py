"""Positions of tokens in time, height and width, and the rotation by them, are those of transformers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pace.llm.layers.rotary import Rotary
from pace.llm.models.model_list import read_config
from pace.ops import reference
from tests.llm.models.towers.seeing import IMAGE, MERGE, MODELS, grid_thw, inputs_of, pixels

pytest.importorskip("transformers")


def oracle_of(model_type: str, **rope):
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, vision = MODELS[model_type]
    text = text | ({"rope_parameters": text["rope_parameters"] | rope} if rope else {})
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision, image_token_id=IMAGE)
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def model_of(oracle):
    model_class, config = read_config(oracle.config.to_dict(), media=True)
    return model_class(config, torch.float32, reference)


def media_of(model, row: list[int], grids: list[tuple[int, int]]):
    from pace.llm.processors.processor import place_media

    media = model.towers[0].read_inputs({"pixel_values": pixels(grids, 0), "image_grid_thw": grid_thw(grids)})
    return place_media([row], media, IMAGE, "image")[0]


@pytest.mark.parametrize("model_type", MODELS)
def test_positions_of_random_mixtures(model_type) -> None:
    oracle = oracle_of(model_type)
    model, chance = model_of(oracle), random.Random(0)
    for seed in range(12):
        grids = [(MERGE * chance.randint(1, 5), MERGE * chance.randint(1, 5)) for _ in range(chance.randint(1, 4))]
        inputs = inputs_of([grids], seed)
        expected, delta = oracle.model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
        )
        row = inputs["input_ids"][0].tolist()
        media = media_of(model, row, grids)
        assert len(media) == len(grids)
        found = model.angle_positions(media, 0, len(row) + 3)
        after = len(row) + np.arange(3) + int(delta)
        assert np.array_equal(found, np.concatenate([expected[:, 0].numpy(), np.tile(after, (3, 1))], 1))
        for _ in range(10):
            start, end = sorted(chance.sample(range(len(row) + 4), 2))
            assert np.array_equal(model.angle_positions(media, start, end), found[:, start:end])


CASES = [
    ("qwen3_vl", {}),
    ("qwen3_vl", {"mrope_section": [4, 1, 1]}),
    ("qwen3_vl", {"mrope_section": [0, 9, 1]}),
    ("qwen2_5_vl", {}),
    ("qwen2_5_vl", {"mrope_section": [0, 3, 1]}),
    ("qwen2_vl", {}),
    ("qwen3_5", {}),
    ("qwen3_5", {"mrope_section": [0, 1, 1], "partial_rotary_factor": 1.0}),
    ("qwen3_5_moe", {"partial_rotary_factor": 0.75}),
]


@pytest.mark.parametrize("model_type, rope", CASES)
def test_angles_of_three_positions(model_type, rope) -> None:
    oracle = oracle_of(model_type, **rope)
    text = oracle.model.language_model.config
    rotary = type(oracle.model.language_model.rotary_emb)(text)
    model = model_of(oracle)
    positions = torch.randint(0, 500, (3, 70), generator=torch.Generator().manual_seed(0))
    expected = [table[0, :, : table.shape[-1] // 2] for table in rotary(torch.zeros(1), positions[:, None])]
    (ours,) = [rotary.angles(positions, positions[0]) for rotary in model.rotaries]
    for found, wanted in zip(ours, expected):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-7)  # transformers rounds the cosine twice
        assert found.is_contiguous()


@pytest.mark.parametrize("model_type", MODELS)
def test_equal_positions_have_the_bits_of_one_position(model_type) -> None:
    """So text has its own angles, also in a step with images."""
    model = model_of(oracle_of(model_type))
    (rotary,) = model.rotaries
    plain, positions = Rotary(rotary.config), torch.tensor([0, 5, 17, 100, 3, 599])
    for whole, one in zip(rotary.angles(positions.expand(3, -1), positions), plain.angles(positions, positions)):
        assert torch.equal(whole, one)


def test_a_text_model_rotates_by_one_position() -> None:
    model_class, config = read_config(oracle_of("qwen3_vl").config.to_dict())
    assert config.rope.sections is None and not model_class(config, torch.float32, reference).towers


@pytest.mark.parametrize(
    ("model_type", "sections"),
    [
        ("qwen3_vl", [2, 2]),
        ("qwen3_vl", [2, 2, -1]),
        ("qwen3_vl", "2"),
        ("qwen3_vl", [2, 2, 2.0]),
        ("qwen2_5_vl", [1, 1, 1]),
    ],
)
def test_sections_that_are_refused(model_type, sections) -> None:
    config = oracle_of(model_type).config.to_dict()
    config["text_config"]["rope_parameters"]["mrope_section"] = sections
    with pytest.raises(
        ValueError, match=r"mrope_section must be three numbers.*; media=False loads only the text model"
    ):
        read_config(config, media=True)
    read_config(config)
