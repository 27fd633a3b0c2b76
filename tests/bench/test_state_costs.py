"""Costs of layers with a state: counted by hand, in the costs of a model and in its predicted speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pace.batch import KVSpec
from pace.bench import plan as planning
from pace.bench.costs import Costs, StateCosts, state_costs
from pace.bench.limits import Limits
from pace.bench.plan import PROCESS_BYTES, plan
from pace.bench.prediction import Efficiency, predict
from pace.bench.shapes import SHAPES, shape_config
from pace.cli import main
from pace.llm.cache.manager import CacheManager
from pace.memory import format_bytes
from pace.states import State
from tests.bench.test_costs import costs_of, tiny_llama

ROOT = Path(__file__).parents[2]
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


def test_costs_of_known_models_by_hand():
    costs = costs_of("qwen3.6-35b-a3b")
    # 30 layers keep a matrix of 128 x 128 for each of 32 heads, and 3 inputs of 8192 channels. 10 layers have 2 key
    # heads of 256.
    assert costs.slot_bytes == 30 * (32 * 128 * 128 + 3 * 8192) * 4 and len(costs.states) == 30
    assert costs.state_flops_per_token == 30 * (7 * 32 * 128 * 128 + 2 * 4 * 8192)
    assert costs.kv_bytes_per_token == 10 * 2 * (256 + 256) * 2
    costs = costs_of("lfm2-1.2b")
    # 10 layers keep 2 inputs of 2048 channels in float32, and 6 layers have 8 key heads of 64 in bfloat16.
    assert (costs.slot_bytes, costs.kv_bytes_per_token) == (10 * 2 * 2048 * 4, 6 * 8 * (64 + 64) * 2)
    assert costs.state_traffic == 2 * costs.slot_bytes and costs.state_flops_per_token == 10 * 3 * 2 * 2048
    assert [layer.window for layer in costs.attention] == [None] * 6


def test_the_page_about_the_cache_has_the_sizes_of_states():
    page = " ".join((ROOT / "docs" / "cache.md").read_text().split())
    rows = {"lfm2-1.2b": "LFM2-1.2B", "qwen3.5-0.8b": "Qwen3.5-0.8B", "qwen3.5-4b": "Qwen3.5-4B",
            "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B", "granite-4-h-tiny": "Granite 4 H Tiny",
            "nemotron-3-nano": "Nemotron 3 Nano"}  # fmt: skip
    for name, title in rows.items():
        costs = costs_of(name)
        layers = f"{len(costs.states)} of {len(costs.cache.layers)} layers"
        state, token = format_bytes(costs.slot_bytes), format_bytes(costs.kv_bytes_per_token)
        assert f"| {title}: {layers} | {state} | {token} |" in page


@pytest.mark.parametrize(("name", "mebibytes"), [("lfm2-1.2b", 64), ("lfm2-1.2b", 1), ("qwen3.5-4b", 3000)])
def test_a_plan_has_the_room_of_a_cache(name, mebibytes):
    """The cache divides its bytes between states and tokens, and the plan knows how."""
    config, limits, room = SHAPES[name], Limits("avx2", 2, 10.0, 100.0), mebibytes << 20
    roomy = plan(config, limits, 64 << 30)[0]
    cache = CacheManager(costs_of(name).cache, room)

    def planned(num_bytes: int, **asked) -> tuple[int, int]:
        found = plan(config, limits, roomy.weight_bytes + PROCESS_BYTES + num_bytes, **asked)[0]
        return found.max_context, found.max_sequences

    longest, sequences = planned(room, context=1)
    with_padding = longest * 16 * cache.spec.group_bytes // cache.spec.block_bytes
    assert 0 <= with_padding - cache.capacity < 16, "a text takes whole blocks"
    assert sequences == cache.free_room.slots
    assert planned(room, prompt=1, context=1, batch=2)[0] == longest // 2
    assert planned(room, prompt=1, context=longest)[1] == 1
    assert planned(room, prompt=1, context=1, batch=sequences + 1)[0] == 0
    assert planned(roomy.state_bytes_per_sequence, prompt=1, context=1) == (0, 0), "a cache has at least two slots"


def test_the_command_shows_states(monkeypatch, capsys):
    monkeypatch.setattr(planning, "machine_limits", lambda num_threads: Limits("avx2", 2, 10.0, 100.0))
    assert main(["plan", "lfm2-1.2b", "--context", "4096"]) == 0
    header, row, *rest = capsys.readouterr().out.splitlines()[1:]
    assert "states" in header and " 0.2 MiB " in row
    assert any(line.startswith("sequences of 4,096 tokens that fit:") for line in rest)
    assert main(["plan", "lfm2-1.2b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"][0]
    assert found["state_bytes_per_sequence"] == 163_840 and found["max_sequences"] > 0
    assert main(["plan", "qwen2.5-0.5b"]) == 0 and "states" not in capsys.readouterr().out


def test_the_first_layers_of_a_shape_have_their_kinds():
    assert shape_config("lfm2-1.2b", 4)["layer_types"] == ["conv", "conv", "full_attention", "conv"]
