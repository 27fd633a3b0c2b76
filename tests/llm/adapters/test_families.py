"""Models with an adapter have peft's logits, in every family whose products are put together in another way."""

from __future__ import annotations

import pytest
import torch

from pace.llm.adapters.slots import AdapterSlots
from pace.llm.runners.eager import EagerRunner
from pace.llm.runners.program import ProgramRunner
from pace.ops import native, reference
from pace.quant import QuantizationConfig
from tests.llm.models.variants import PROMPT, save_tiny
from tests.llm.models.visit import TOLERANCE, relative_error
from tests.plugins.tiers import sample
from tests.support import Runner, load_model

peft = pytest.importorskip("peft")
from tests.llm.adapters.random_adapters import logits_of, random_adapter  # noqa: E402

FAMILIES = [
    ("llama", {}),  # queries, keys and values, gate and up: one product of several tensors
    ("gpt2", {}),  # transposed matrices; one tensor for queries, keys and values
    ("phi3", {}),  # qkv_proj and gate_up_proj
    ("gpt_neox", {}),  # heads of [query, key, value]; both branches read x
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),  # an activation in a product; norms of sums
    ("gemma2", {}),  # norms after branches
    ("qwen3_moe", {}),  # attention next to experts
    ("bloom", {}),
    ("chatglm", {}),
    ("cohere", {}),
    ("deepseek_v3", {"q_lora_rank": 20}),
    ("falcon", {}),
    ("falcon_h1", {}),
    ("gemma4_text", {}),
    ("glm4", {}),
    ("gptj", {}),
    ("granite", {}),
    ("mamba2", {}),
    ("mixtral", {}),
    ("mpt", {}),
    ("phi", {}),
    ("qwen2_moe", {}),
    ("qwen3_next", {}),
    ("starcoder2", {}),
]
FIRST = FAMILIES[:7]


def with_adapters(model, *adapters, kind=ProgramRunner, **limits):
    runner = kind(model)
    runner.adapters = AdapterSlots(model, **limits)
    for weights in adapters:
        runner.adapters.load(weights)
    return runner


def prefill(runner, ids, route=None):
    routes = None if route is None else {0: route}
    return Runner(runner, 1, len(ids)).step({0: ids}, {0: len(ids)}, routes=routes)[0]


@pytest.mark.parametrize("case", sample(FAMILIES, lambda case: case in FIRST), ids=lambda case: case[0])
def test_logits_are_those_of_peft(case, tmp_path):
    """An adapter adds sums of at most 64 terms to each sum of the base. So rounding errors are at most sqrt(2) times
    those of the base, which are well within the tolerance."""
    base = save_tiny(tmp_path, *case)
    adapted, weights = random_adapter(base, 1)
    ids = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(3))
    expected, plain = logits_of(adapted, ids), logits_of(base, ids)
    assert relative_error(plain, expected) > 0.05, "the adapter does something"
    for ops, kind in ((native, ProgramRunner), (native, EagerRunner), (reference, EagerRunner)):
        runner = with_adapters(load_model(tmp_path, torch.float32, ops), weights, kind=kind)
        assert relative_error(prefill(runner, ids, [(0, 1.0)]), expected) < TOLERANCE, (ops.__name__, kind.__name__)
        assert relative_error(prefill(runner, ids), plain) < TOLERANCE


@pytest.mark.parametrize("fields", [
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 7, "down_proj": 1}, "alpha_pattern": {"v_proj": 3, "up_proj": 40}},
    {"lora_bias": True, "targets": ["k_proj", "gate_proj", "o_proj"]},
    {"targets": ["lm_head"]},
    {"targets": ["v_proj"]},
], ids=str)  # fmt: skip
def test_every_scale_bias_and_choice_of_modules(fields, tmp_path):
    base = save_tiny(tmp_path, "llama", {"mlp_bias": True, "attention_bias": True})
    adapted, weights = random_adapter(base, 1, **fields)
    ids = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(3))
    runner = with_adapters(load_model(tmp_path, torch.float32, native), weights)
    assert relative_error(prefill(runner, ids, [(0, 1.0)]), logits_of(adapted, ids)) < TOLERANCE


def test_a_tied_head_has_an_adapter_of_its_own(tmp_path):
    base = save_tiny(tmp_path, "llama", {"tie_word_embeddings": True})
    adapted, weights = random_adapter(base, 1, ["lm_head"])
    ids = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(3))
    runner = with_adapters(load_model(tmp_path, torch.float32, native), weights)
    assert relative_error(prefill(runner, ids, [(0, 1.0)]), logits_of(adapted, ids)) < TOLERANCE


def test_several_adapters_of_a_row_add_up(tmp_path):
    base = save_tiny(tmp_path, "llama", {})
    one, first = random_adapter(base, 1)
    _, second = random_adapter(base, 2, r=7)
    both = one
    both.add_adapter("second", peft.LoraConfig(r=7, lora_alpha=6, target_modules=list(second.modules)))
    with torch.no_grad():
        for path, module in second.modules.items():
            layer = both.base_model.model.get_submodule(path)
            layer.lora_A["second"].weight.copy_(module.a)
            layer.lora_B["second"].weight.copy_(module.b)
    weights = {"default": 0.5, "second": -1.5}
    for layer in both.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            for name, weight in weights.items():
                layer.scaling[name] *= weight
    both.base_model.set_adapter(["default", "second"])
    ids = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(3))
    runner = with_adapters(load_model(tmp_path, torch.float32, native), first, second)
    ours = prefill(runner, ids, [(0, 0.5), (1, -1.5)])
    assert relative_error(ours, logits_of(both, ids)) < TOLERANCE


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4"])
def test_a_quantised_base_has_adapters_in_floats(format, tmp_path):
    """The reference multiplies the same codes by inputs that are not quantised. Its distance from the kernels is at
    most twice that of the base without an adapter."""
    base = save_tiny(tmp_path, "llama", {"hidden_size": 64, "intermediate_size": 96})
    _, weights = random_adapter(base, 1)
    ids = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(3))
    found = {}
    for ops in (native, reference):
        model = quantised(tmp_path, format, ops)
        runner = with_adapters(model, weights, kind=ProgramRunner if ops is native else EagerRunner)
        found[ops] = prefill(runner, ids), prefill(runner, ids, [(0, 1.0)])
    plain = relative_error(found[native][0], found[reference][0])
    assert relative_error(found[native][1], found[reference][1]) <= 2 * plain
    assert relative_error(found[native][1], found[native][0]) > 0.05


def quantised(folder, format, ops):
    import json

    from safetensors.torch import load_file

    from pace.llm.models.model_list import read_config
    from tests.support import TensorDict

    model_class, config = read_config(json.loads((folder / "config.json").read_text()))
    model = model_class(config, torch.float32, ops)
    model.quantize(QuantizationConfig(format))
    model.load_weights(TensorDict(load_file(folder / "model.safetensors")))
    return model
