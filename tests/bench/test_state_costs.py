"""Costs of layers with a state: counted by hand, in the costs of a model and in its predicted speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pace.batch import KVSpec
from pace.bench.costs import Costs, StateCosts, state_costs
from pace.bench.limits import Limits
from pace.bench.prediction import Efficiency, predict
from pace.states import State
from tests.bench.test_costs import tiny_llama

DELTA = State(channels=8192, kernel=4, heads=32, key_dim=128, value_dim=128)
"""A layer of Qwen3.6-35B-A3B."""
SHORT = State(channels=2048, kernel=3)
"""A layer of LFM2-1.2B."""


def test_a_state_by_hand():
    matrix, inputs = 32 * 128 * 128, 3 * 8192
    bytes_moved, flops = state_costs(DELTA, True, torch.float32)
    assert bytes_moved == 4 * (matrix + inputs)
    # decay, 1; key, update and query, 2 each; a convolution of 4 inputs
    assert flops == 7 * matrix + 8 * 8192
    assert state_costs(DELTA, False, torch.float32).flops_per_token == flops - 2 * matrix
    assert state_costs(SHORT, False, torch.float32) == StateCosts(4 * 2 * 2048, 6 * 2048)
    assert state_costs(DELTA, True, torch.float64).state_bytes == 2 * bytes_moved


@pytest.fixture
def pair() -> tuple[Costs, Costs]:
    """Costs of a model of attention, and of one that also has two layers with a state."""
    plain = Costs.of(tiny_llama(), torch.float32)
    states = state_costs(DELTA, True, torch.float32), state_costs(SHORT, False, torch.float32)
    cache = KVSpec((*plain.cache.layers, DELTA, SHORT), torch.float32)
    return plain, replace(plain, cache=cache, states=states)


def test_every_sequence_reads_and_writes_its_states(pair):
    plain, hybrid = pair
    (one, one_flops), (other, other_flops) = hybrid.states
    assert hybrid.slot_bytes == one + other and plain.slot_bytes == plain.state_traffic == 0
    assert hybrid.cached_bytes(0) == hybrid.slot_bytes
    assert hybrid.cached_bytes(100) == plain.cached_bytes(100) + hybrid.slot_bytes
    assert hybrid.decode_bytes(3, 10) - plain.decode_bytes(3, 10) == 3 * 2 * (one + other)
    assert hybrid.decode_flops(3, 10) - plain.decode_flops(3, 10) == 3 * (one_flops + other_flops)
    assert hybrid.prefill_flops(50) - plain.prefill_flops(50) == 50 * (one_flops + other_flops)


def test_predictions_have_the_time_of_the_states(pair):
    plain, hybrid = pair
    reached = Efficiency(weights=0.5, products=0.8, cache=0.4, decode_attention=0.2, prefill_attention=0.5)
    slow_memory, slow_cores = Limits("avx2", 2, 1.0, 1e6), Limits("avx2", 2, 1e6, 1.0)

    def added(limits: Limits) -> tuple[float, float]:
        less, more = (predict(costs, reached, limits, prompt=600, context=600, batch=3) for costs in pair)
        return more.prefill_seconds - less.prefill_seconds, more.step_seconds - less.step_seconds

    flops = hybrid.state_flops_per_token
    assert added(slow_memory)[1] == pytest.approx(3 * hybrid.state_traffic / 0.4e9)
    assert added(slow_cores) == pytest.approx((600 * flops / 0.5e9, 3 * flops / 0.5e9))
