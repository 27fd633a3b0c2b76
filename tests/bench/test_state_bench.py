"""`pace bench`, samples of `pace plan` and memory reports of a model with states."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from pace.bench import measure, report, sample
from pace.bench.limits import Limits
from pace.bench.shapes import SHAPES
from pace.llm import LLMModel, SamplingConfig
from pace.llm.loading.checkpoint import Checkpoint
from tests.llm.models.variants import save_tiny

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, head_dim=16,
             linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
             vocab_size=200, max_position_embeddings=512)  # fmt: skip
MATRICES, INPUTS = 3 * 4 * 16 * 32 * 4, 3 * 3 * (2 * 2 * 16 + 4 * 32) * 4
"""Bytes of the states of three layers."""


pytestmark = pytest.mark.usefixtures("quick_limits")


@functools.cache
def loaded():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", SHAPES["qwen3.5-0.8b"] | SIZES)
        return measure.load("tiny")


@pytest.mark.parametrize("depth", [None, 300])
def test_states_are_measured(depth):
    subject = loaded()
    result = measure.measure(subject, prompt=20, generated=4, batch=3, repeats=1, depth=depth)
    assert result.decode.instructions["recurrence"][::2] == (3, 3 * 2 * MATRICES)
    assert result.decode.instructions["convolution"][::2] == (3, 3 * 2 * INPUTS)
    costs = result.costs
    kv_bytes = result.context * costs.kv_bytes_per_token
    assert costs.decode_bytes(3, result.context) - costs.decode_weight_bytes == 3 * (kv_bytes + 2 * (MATRICES + INPUTS))
    assert re.search(
        r"\nstates +[\d.]+ KiB a sequence +a decode step reads and writes them: [\d.]+% of", report.table(result)
    )
    assert result.as_dict()["state_bytes_per_sequence"] == MATRICES + INPUTS
    subject.engine.check_idle()


def test_slots_are_filled_with_numbers_of_an_ordinary_size():
    engine = loaded().engine
    sequences = measure._sequences(loaded(), 40, 4, 2)
    measure.fill_cache(engine, sequences)
    engine.cache.check_integrity(sequences)
    for sequence in sequences:
        for layer in engine.cache.kv[:3]:
            for tensor in (layer.inputs, layer.matrix):
                assert 0.5 < tensor[sequence.state.slot].std() < 2
        engine.cache.free(sequence)
    engine.check_idle()


def test_more_sequences_than_states_are_refused(monkeypatch):
    monkeypatch.setattr(type(loaded().engine.cache.states), "num_free", 2)
    with pytest.raises(ValueError, match=r"3 sequences need .* for their states, and .* has room for the states of 2"):
        measure.measure(loaded(), prompt=20, batch=3)


def test_layers_are_sampled_and_memory_is_reported(tmp_path):
    save_tiny(tmp_path, "granitemoehybrid", {"max_position_embeddings": 200})
    tried = sample.Sample(Checkpoint(tmp_path))
    corrections = tried.corrections(
        torch.float32, torch.float32, None, Limits("avx2", 1, 10.0, 100.0), sample.Prompts(16, 40, 3)
    )
    assert corrections.prefill > 0 and corrections.decode > 0
    with LLMModel(tmp_path, dtype="float32", kv_cache_bytes="1MiB", progress=False) as model:
        slots = model.generator.engine.cache.spec.slots()
        before = model.memory_report()
        assert before.cache_slot_bytes == slots.slot_bytes > 0 and before.cache_slots >= 2
        assert f"states of one text ({before.cache_slots:,} fit)" in str(before)
        with model.session() as session:
            session.append([1, 2, 3])
            block = model.generator.engine.cache.spec.block_bytes
            assert model.memory_report().cache_used == block + before.cache_slot_bytes
        model.generate([[1, 2]], SamplingConfig(max_new_tokens=2, ignore_eos=True))
        assert before.cache_touched < model.memory_report().cache_touched <= before.cache_budget
