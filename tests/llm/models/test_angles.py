"""The cosines and sines of a step are rounded once, and depend on the position but not on its place in the batch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from pace.llm.layers.rotary import RopeConfig, Rotary, Temperature

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
    """The true values are those of the float32 angle. A float32 cosine would be off by a bit in one of twenty cases."""
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


def test_the_long_factors_may_have_a_scale_of_their_own() -> None:
    usual, scaled = CONFIGS[2], dataclasses.replace(CONFIGS[2], attention_factor=1.5, long_attention_factor=2.5)
    positions, lengths = torch.full((2,), 7), torch.tensor([100, 101])
    (cos, _), (plain, _) = (Rotary(config).angles(positions, lengths) for config in (scaled, usual))
    torch.testing.assert_close(cos / plain, torch.tensor([[1.5], [2.5]]).expand(2, 3) / 1.19)


def test_temperatures_rise_at_multiples_of_their_period() -> None:
    positions = torch.tensor([0, 8190, 8191, 8192, 16383, 10**6])
    factors, zeros = Temperature(6, period=8192, scale=0.1, table=1).angles(positions, positions + 1)
    expected = [1 + 0.1 * math.log1p((position + 1) // 8192) for position in positions.tolist()]
    assert torch.equal(factors, torch.tensor(expected, dtype=torch.float64).float()[:, None].expand(6, 3))
    assert expected[1] == 1 < expected[2] and not zeros.any() and factors.is_contiguous()
    early, _ = Temperature(6, period=8192, scale=0.1, table=1, offset=0).angles(positions[1:4], positions[1:4])
    assert early[:, 0].tolist() == [1, 1, factors[2, 0].item()]  # a position later


def test_a_backward_rotation_is_that_of_the_negative_angle() -> None:
    positions = torch.arange(9)
    (cos, sin), (same, negative) = (
        Rotary(dataclasses.replace(CONFIGS[0], backwards=backwards)).angles(positions, positions)
        for backwards in (False, True)
    )
    assert torch.equal(same, cos) and torch.equal(negative, -sin) and sin.any()
