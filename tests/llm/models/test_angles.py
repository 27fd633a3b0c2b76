"""The cosines and sines of a step: rounded once, and the same for a position wherever it stands."""

from __future__ import annotations

import math

import pytest
import torch

from pace.llm.layers.rotary import RopeConfig, Rotary

CONFIGS = [
    RopeConfig("default", theta=10000.0, dim=64, max_positions=4096),
    RopeConfig("dynamic", theta=10000.0, dim=10, max_positions=100, factor=4.0),
    RopeConfig(
        "longrope",
        1e4,
        6,
        4096,
        original_max_positions=100,
        short_factor=(1.0, 1.1, 1.3),
        long_factor=(2.0, 3.0, 5.0),
        attention_factor=1.19,
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_angles_are_the_true_values_rounded_once(config: RopeConfig) -> None:
    """Of the angle in float32, by the definition; a cosine in float32 would be off by a bit in one case of twenty."""
    rotary = Rotary(config)
    positions = torch.tensor([0, 1, 2, 99, 100, 101, 1000, 3001])
    lengths = positions + 1
    frequencies = rotary.frequencies(lengths).expand(len(positions), rotary.half)
    cos, sin = rotary.angles(positions, lengths)
    for row, position in enumerate(positions.tolist()):
        angles = (torch.tensor(float(position)) * frequencies[row]).tolist()
        factor = config.attention_factor
        assert torch.equal(
            cos[row], torch.tensor([math.cos(angle) * factor for angle in angles], dtype=torch.float64).float()
        )
        assert torch.equal(
            sin[row], torch.tensor([math.sin(angle) * factor for angle in angles], dtype=torch.float64).float()
        )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_positions_angles_do_not_depend_on_its_neighbours(config: RopeConfig) -> None:
    positions = torch.randperm(700, generator=torch.Generator().manual_seed(0))
    together, alone = Rotary(config).angles(positions, positions + 1), Rotary(config)
    for row, position in list(enumerate(positions.tolist()))[:200]:
        for whole, single in zip(together, alone.angles(torch.tensor([position]), torch.tensor([position + 1]))):
            assert torch.equal(whole[row], single[0])
