"""Adapters of embeddings, each row with its own, next to those of products; and the same merged."""

from __future__ import annotations

import pytest
import torch

from pace.llm.runners.eager import EagerRunner
from pace.llm.runners.program import ProgramRunner
from pace.ops import native, reference
from tests.llm.models.variants import PROMPT, save_tiny
from tests.llm.models.visit import TOLERANCE, relative_error
from tests.support import load_model

pytest.importorskip("peft")
from tests.llm.adapters.random_adapters import logits_of, random_adapter, targets_of
from tests.llm.adapters.test_bits import alone, together, unfused
from tests.llm.adapters.test_families import prefill, with_adapters
from tests.llm.adapters.test_merge import load

CASES = [
    ("llama", {}, ["embed_tokens"]),
    ("llama", {"tie_word_embeddings": True}, ["embed_tokens", "lm_head", "q_proj"]),
    ("gemma2", {}, ["embed_tokens"]),  # a scale after the adapter
    ("gpt2", {}, ["wte", "wpe"]),  # rows of positions
]
IDS = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(3))


def with_embedding(base, seed, targets, r=4):
    adapted, weights = random_adapter(base, seed, targets, r=r)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_embedding" in name:
                parameter.mul_(4.0)  # as much as the embedding itself
    return adapted, weights


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_peft(case, tmp_path):
    model_type, fields, targets = case
    base = save_tiny(tmp_path, model_type, fields)
    adapted, weights = with_embedding(base, 1, targets)
    expected, plain = logits_of(adapted, IDS), logits_of(base, IDS)
    assert relative_error(plain, expected) > 0.05
    assert any(module.of_embedding for module in weights.modules.values())
    for ops, kind in ((native, ProgramRunner), (native, EagerRunner), (reference, EagerRunner)):
        runner = with_adapters(load_model(tmp_path, torch.float32, ops), weights, kind=kind)
        assert relative_error(prefill(runner, IDS, [(0, 1.0)]), expected) < TOLERANCE, (ops.__name__, kind.__name__)
        assert relative_error(prefill(runner, IDS), plain) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_are_their_own(dtype, tmp_path):
    base = save_tiny(tmp_path, "qwen3", {})
    adapters = [
        with_embedding(base, seed, targets, rank)[1]
        for seed, targets, rank in ((1, ["embed_tokens", "v_proj"], 4), (2, ["q_proj"], 3), (3, ["embed_tokens"], 7))
    ]
    model = load_model(tmp_path, dtype, native)
    runner = with_adapters(model, *adapters)
    expected, ours = {s: alone(runner, s) for s in range(6)}, together(runner)
    assert all(torch.equal(ours[s], expected[s]) for s in range(6))
    assert torch.equal(expected[1], alone(ProgramRunner(model), 1)), (
        "base rows have the bits of a model without adapters"
    )
    for other in (with_adapters(model, *adapters, kind=EagerRunner), unfused(model, *adapters)):
        ours = together(other)
        assert all(torch.equal(ours[s], expected[s]) for s in range(6)), type(other)
    assert torch.equal(expected[0], alone(with_adapters(model, adapters[0]), 0)), "alone is as among several"
    last = prefill(with_adapters(model, adapters[2]), IDS, [(0, 1.0)])
    assert torch.equal(prefill(runner, IDS, [(2, 1.0)]), last), "in any slot"


def test_slots_are_emptied(tmp_path):
    base = save_tiny(tmp_path, "qwen3", {})
    model = load_model(tmp_path, torch.float32, native)
    first, second = (with_embedding(base, seed, ["embed_tokens"])[1] for seed in (1, 2))
    runner = with_adapters(model, first, max_adapters=1)
    before = runner.adapters.nbytes
    expected = alone(with_adapters(model, second), 0)
    runner.adapters.unload(first.digest)
    runner.adapters.free(())
    assert runner.adapters.nbytes == 0 < before
    runner.adapters.load(second)
    assert torch.equal(alone(runner, 0), expected) and runner.adapters.nbytes == before
    wrong = with_embedding(save_tiny(tmp_path / "other", "qwen3", {"vocab_size": 111}), 1, ["embed_tokens"])[1]
    with pytest.raises(ValueError, match=r"embed_tokens has A \[4, 111\] and B \[32, 4\]"):
        runner.adapters.check(wrong)


def test_merged_embeddings(tmp_path):
    base = save_tiny(tmp_path, "llama", {})
    adapted, weights = with_embedding(base, 1, ["embed_tokens", "lm_head", *targets_of(base)])
    ours = prefill(ProgramRunner(load(tmp_path, weights)), IDS)
    assert relative_error(ours, logits_of(adapted, IDS)) < TOLERANCE
    tied = save_tiny(tmp_path / "tied", "llama", {"tie_word_embeddings": True})
    with pytest.raises(ValueError, match="changes the embedding, which is the head in this model; load the adapter w"):
        load(tmp_path / "tied", with_embedding(tied, 1, ["embed_tokens"])[1])
