"""Merged adapters: peft's own merge, rounded once."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from pace.llm.adapters.merge import MergedReader
from pace.llm.adapters.weights import AdapterModule, AdapterWeights
from pace.llm.models.model_list import read_config
from pace.llm.runners.program import ProgramRunner
from pace.ops import native
from pace.quant import QuantizationConfig
from tests.llm.models.variants import PROMPT, save_tiny
from tests.llm.models.visit import TOLERANCE, relative_error
from tests.support import TensorDict

pytest.importorskip("peft")
from tests.llm.adapters.random_adapters import logits_of, random_adapter, targets_of
from tests.llm.adapters.test_families import prefill


def load(folder, weights=None, dtype=torch.float32, quantization=None, state=None):
    model_class, config = read_config(json.loads((folder / "config.json").read_text()))
    model = model_class(config, dtype, native)
    model.quantize(quantization)
    reader = TensorDict(state or load_file(folder / "model.safetensors"))
    model.load_weights(reader if weights is None else MergedReader(reader, model, weights))
    return model


@pytest.mark.parametrize("model_type, fields", [("llama", {}), ("gpt2", {}), ("phi3", {}), ("gpt_neox", {})], ids=str)
def test_merged_weights_are_those_of_peft(model_type, fields, tmp_path):
    base = save_tiny(tmp_path, model_type, fields)
    adapted, weights = random_adapter(base, 1, [*targets_of(base)])
    ids = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(3))
    ours = prefill(ProgramRunner(load(tmp_path, weights)), ids)
    assert relative_error(ours, logits_of(adapted, ids)) < TOLERANCE
    assert relative_error(ours, logits_of(adapted.merge_and_unload(), ids)) < TOLERANCE


@pytest.mark.parametrize("dtype, format", [(torch.bfloat16, None), (torch.float32, "int8"), (torch.bfloat16, "int4")])
def test_sums_are_rounded_once(dtype, format, tmp_path):
    """The expected model loads sums that were saved in float32."""
    base = save_tiny(tmp_path, "llama", {"hidden_size": 64})
    _, weights = random_adapter(base, 1)
    quantization = format and QuantizationConfig(format)
    state = load_file(tmp_path / "model.safetensors")
    for path, module in weights.modules.items():
        state[f"{path}.weight"] = state[f"{path}.weight"].float() + module.b @ module.a * module.scale
    ids = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(3))
    expected = prefill(ProgramRunner(load(tmp_path, None, dtype, quantization, state)), ids)
    ours = prefill(ProgramRunner(load(tmp_path, weights, dtype, quantization)), ids)
    assert relative_error(ours, expected) < 2**-7, "products of rows in pieces may differ in their last bit"


def test_biases_are_merged_into_biases(tmp_path):
    base = save_tiny(tmp_path, "llama", {"attention_bias": True})
    adapted, weights = random_adapter(base, 1, ["q_proj", "o_proj"], lora_bias=True)
    ids = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(3))
    ours = prefill(ProgramRunner(load(tmp_path, weights)), ids)
    assert relative_error(ours, logits_of(adapted, ids)) < TOLERANCE


def test_what_cannot_be_merged_is_refused(tmp_path):
    save_tiny(tmp_path, "llama", {"tie_word_embeddings": True})

    def refused(path, n, k, bias=None):
        module = AdapterModule(torch.ones(2, k), torch.ones(n, 2), bias, 1.0)
        with pytest.raises(ValueError) as error:
            load(tmp_path, AdapterWeights("x", {path: module}))
        return str(error.value)

    q = "model.layers.0.self_attn.q_proj"
    assert "no such matrix" in refused("model.layers.0.self_attn.nothing", 3, 3)
    assert "A and B are for a matrix [32, 31]" in refused(q, 32, 31)
    assert "none to add it to" in refused(q, 32, 32, torch.ones(32))
    assert "the embedding's matrix" in refused("lm_head", 99, 32)
