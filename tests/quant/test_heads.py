"""LM heads in their own format: what they cost, and one matrix that is held twice."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from pace.assets import TINY
from pace.bench.costs import Costs
from pace.cli import main
from pace.llm import LLMModel, QuantizationConfig
from pace.llm.layers import SplitLMHead
from pace.llm.loading import weights_cache
from pace.llm.models.head_cost import head_cost
from pace.llm.models.model_list import read_config
from pace.ops import native
from pace.quant import read_quantization

SPLIT = {"format": "float", "lm_head": "int4", "embedding": "float"}
MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def load(quantization=None, **options) -> LLMModel:
    return LLMModel(TINY, quantization=quantization, progress=False, **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [None, "int4", {"format": "float", "lm_head": "q8_0"}])
def test_the_cost_is_that_of_the_plan(tied, quantization):
    model_class, config = read_config(MIXTURE | {"tie_word_embeddings": tied})
    model = model_class(config, torch.bfloat16, native)
    model.quantize(read_quantization(quantization))
    costs, found = Costs.of(model, torch.bfloat16), head_cost(model, native, torch.bfloat16)
    assert found.num_bytes == costs.head_bytes and found.is_embedding == tied
    assert found.token_bytes == pytest.approx(costs.decode_weight_bytes, abs=len(model.layers))  # experts, rounded


def test_one_matrix_is_held_twice_if_asked():
    prompt = [list(range(5, 40))]
    with load() as plain, load(SPLIT) as split, load({"format": "float", "lm_head": "int4"}) as shared:
        inner = split._model
        assert isinstance(inner.lm_head, SplitLMHead) and not split.memory_report().head.is_embedding
        assert shared.memory_report().head.is_embedding
        size = lambda model: sum(model.memory_report().weights.values())
        assert size(split) == size(plain) + split.memory_report().head.num_bytes
        matrix = native.unpack(plain._model.embedding.weight)
        assert torch.equal(native.unpack(inner.embedding.weight), matrix)
        codes = native.quantize(matrix, QuantizationConfig("int4").format, "lm_head.weight")
        assert torch.equal(native.unpack(inner.lm_head.weight), codes.dequantize())
        assert split.generate(prompt).generated_token_ids


def test_a_packed_copy_holds_both_matrices(tmp_path, monkeypatch):
    monkeypatch.setenv("PACE_CACHE", str(tmp_path))
    monkeypatch.setenv("PACE_CACHE_SIZE", "64MiB")
    monkeypatch.setattr(weights_cache, "MIN_BYTES", 1)

    def logits(**options) -> torch.Tensor:
        with load(SPLIT, **options) as model, model.session() as session:
            return session.append(list(range(5, 20)), logits="all")

    expected, written, read = logits(weights_cache=False), logits(), logits()
    assert torch.equal(written, expected) and torch.equal(read, expected)
    assert len(list(tmp_path.rglob(f"*{weights_cache.SUFFIX}"))) == 1


def test_the_last_config_decides():
    with load() as model:
        inner, tied = model._model, model._model.lm_head
        inner.quantize(QuantizationConfig(**SPLIT))
        assert isinstance(inner.lm_head, SplitLMHead)
        inner.quantize(None)
        assert inner.lm_head is tied


def test_a_large_head_is_named(caplog):
    with caplog.at_level(logging.INFO, "pace"):
        load({"format": "int4", "lm_head": "float"}).close()
        assert "LM head and embedding, one matrix, in bfloat16" in caplog.text
        caplog.clear()
        load().close()
    assert "LM head" not in caplog.text


def run(capsys, *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_eval_compares_heads(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a dog that liked to run.")
    found = run(capsys, "eval", str(TINY), "--text", str(text), "--against", "bf16", "--heads", "float", "q6_k", "int4")
    kls = [row["kl_divergence"] for row in found["heads"]]
    sizes = [row["head"]["num_bytes"] for row in found["heads"]]
    assert kls[0] == 0 and kls[0] < kls[1] < kls[2] and sizes == sorted(sizes, reverse=True)


def test_plan_and_quantize_take_a_head(capsys, tmp_path):
    words = ["plan", str(TINY), "--no-sample", "--quantization", "int4", "--lm-head", "q6_k"]
    head = run(capsys, *words)["plans"][0]["head"]
    assert head["format"] == "q6_k"
    quantize = ["quantize", str(TINY), str(tmp_path / "out"), "--method", "rtn", "--lm-head"]
    report = run(capsys, *quantize, "int4")
    assert report["head"]["is_embedding"] and "int4" in report["head"]["format"]
    assert main([*quantize[:2], str(tmp_path / "other"), *quantize[3:], "int4", "--embedding", "float"]) != 0
    assert "one matrix" in capsys.readouterr().err
