"""Adapters of experts are merged in all forms of adapter and checkpoint. So are modules trained in full."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from safetensors.torch import load_file

from pace.llm.adapters.peft import read_peft
from pace.llm.adapters.read import read_adapter
from pace.llm.adapters.slots import AdapterSlots
from pace.llm.adapters.weights import AdapterModule, AdapterWeights
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.runners.program import ProgramRunner
from pace.ops import native
from tests.llm.models.variants import PROMPT, save_tiny
from tests.llm.models.visit import TOLERANCE, relative_error
from tests.support import load_model

peft = pytest.importorskip("peft")
from tests.llm.adapters.random_adapters import logits_of  # noqa: E402
from tests.llm.adapters.test_families import prefill  # noqa: E402
from tests.llm.adapters.test_merge import load  # noqa: E402

IDS = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(3))
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def adapted_by(base, folder, **fields):
    """A model of peft with random values, saved in `folder`."""
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 3, "target_modules": [], "init_lora_weights": False} | fields)
    adapted = peft.get_peft_model(copy.deepcopy(base), config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3, generator=generator)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    adapted.save_pretrained(folder)
    return adapted


def read(folder, adapter) -> AdapterWeights:
    state = load_file(folder / "model.safetensors")
    return read_peft(adapter, "x", state.__getitem__)


def stacked(state):
    """The tensors of a checkpoint with those of all experts in one, as transformers 5 has them in memory."""
    found, experts = dict(state), {}
    for name in state:
        if part := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            experts.setdefault(part[1], {})[int(part[2]), part[3]] = found.pop(name)
    for name, parts in experts.items():
        count = max(expert for expert, _ in parts) + 1
        found[f"{name}.gate_up_proj"] = torch.stack(
            [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(count)]
        )
        found[f"{name}.down_proj"] = torch.stack([parts[e, "down"] for e in range(count)])
    return found


@pytest.mark.parametrize(
    "model_type, targets",
    [("qwen3_moe", BOTH), ("mixtral", BOTH), ("gpt_oss", BOTH), ("qwen3_moe", BOTH[:1]), ("qwen3_moe", BOTH[1:])],
    ids=str,
)
def test_tensors_of_all_experts(model_type, targets, tmp_path):
    """gpt-oss has transposed matrices, whose rows of gate and up alternate."""
    base = save_tiny(tmp_path / "base", model_type, {})
    adapted = adapted_by(base, tmp_path / "adapter", target_parameters=targets, alpha_pattern={"experts.down_proj": 5})
    expected = logits_of(adapted, IDS)
    weights = read(tmp_path / "base", tmp_path / "adapter")
    assert not weights.modules and {len(found) for found in weights.experts.values()} == {len(targets)}
    ours = prefill(ProgramRunner(load(tmp_path / "base", weights)), IDS)
    assert relative_error(logits_of(base, IDS), expected) > 0.02
    assert relative_error(ours, expected) < TOLERANCE
    with pytest.raises(NotImplementedError, match=r"layers\.0\.mlp\.experts.*merge=True"):
        AdapterSlots(load_model(tmp_path / "base", torch.float32, native)).check(weights)


def test_either_form_of_the_checkpoint(tmp_path):
    base = save_tiny(tmp_path / "base", "qwen3_moe", {})
    adapted_by(base, tmp_path / "adapter", target_parameters=BOTH)
    weights = read(tmp_path / "base", tmp_path / "adapter")
    apart = load_file(tmp_path / "base" / "model.safetensors")
    assert any(".experts.0.gate_proj" in name for name in apart)
    found = [
        prefill(ProgramRunner(load(tmp_path / "base", weights, state=state)), IDS) for state in (apart, stacked(apart))
    ]
    # Products of rows in pieces may differ in their last bit.
    assert relative_error(found[0], found[1]) < TOLERANCE


@pytest.mark.parametrize("in_one", [False, True])
def test_modules_of_single_experts(in_one, tmp_path):
    """Adapters trained with transformers 4 have such names."""
    base = save_tiny(tmp_path, "qwen3_moe", {})
    state = load_file(tmp_path / "model.safetensors")
    modules, expected = {}, dict(state)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in state.items():
        if re.search(r"layers\.1\.mlp\.experts\.[02]\.(gate|down)_proj", name):
            a, b = (torch.randn(shape, generator=generator) for shape in ((3, tensor.shape[1]), (tensor.shape[0], 3)))
            modules[name.removesuffix(".weight")] = AdapterModule(a, b, None, 0.1)
            expected[name] = tensor.float() + 0.1 * b @ a
    assert len(modules) == 4 and base is not None
    weights = AdapterWeights("x", modules)
    ours = prefill(ProgramRunner(load(tmp_path, weights, state=stacked(state) if in_one else state)), IDS)
    theirs = prefill(ProgramRunner(load(tmp_path, state=expected)), IDS)
    assert relative_error(ours, theirs) < TOLERANCE
    assert relative_error(ours, prefill(ProgramRunner(load(tmp_path)), IDS)) > 0.01
    slots = AdapterSlots(load(tmp_path, state=stacked(state) if in_one else state))
    with pytest.raises(NotImplementedError, match="experts.0.gate_proj.*merge=True"):
        slots.check(weights)


def test_modules_trained_in_full(tmp_path):
    base = save_tiny(tmp_path / "base", "llama", {})
    fields = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "model.norm"]}
    adapted = adapted_by(base, tmp_path / "adapter", **fields)
    weights = read(tmp_path / "base", tmp_path / "adapter")
    assert sorted(weights.wholes) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    ours = prefill(ProgramRunner(load(tmp_path / "base", weights)), IDS)
    assert relative_error(ours, logits_of(adapted, IDS)) < TOLERANCE
    with pytest.raises(NotImplementedError, match=r"lm_head\.weight.*merge=True"):
        AdapterSlots(load(tmp_path / "base")).check(weights)


def test_embedding_and_head_trained_as_one_matrix(tmp_path):
    """With ensure_weight_tying, PEFT names the embedding alone, and saves both."""
    base = save_tiny(tmp_path / "base", "llama", {"tie_word_embeddings": True})
    fields = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    adapted = adapted_by(base, tmp_path / "adapter", **fields)
    weights = read_adapter(tmp_path / "adapter", "x", Checkpoint(tmp_path / "base"))
    assert sorted(weights.wholes) == ["lm_head.weight", "model.embed_tokens.weight"]
    ours = prefill(ProgramRunner(load(tmp_path / "base", weights)), IDS)
    assert relative_error(ours, logits_of(adapted, IDS)) < TOLERANCE


def test_convolutions_are_compared_and_refused(tmp_path):
    base = save_tiny(tmp_path / "base", "qwen3_next", {})
    adapted_by(base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["conv1d"])
    with pytest.raises(NotImplementedError, match=r"conv1d.*in full, \[184, 1, 4\].*convolutions trained in full are"):
        read(tmp_path / "base", tmp_path / "adapter")


def test_experts_trained_in_full_are_refused_by_name(tmp_path):
    """For both forms of a checkpoint."""
    base = save_tiny(tmp_path / "base", "qwen3_moe", {})
    adapted_by(base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["experts"])
    state = load_file(tmp_path / "base" / "model.safetensors")
    for found in (state, stacked(state)):
        with pytest.raises(
            NotImplementedError, match=r"mlp\.experts\.\w+' in full, .* as modules_to_save asks.*experts "
        ):
            read_peft(tmp_path / "adapter", "x", found.__getitem__)


def test_what_does_not_fit_is_refused(tmp_path):
    base = save_tiny(tmp_path / "base", "qwen3_moe", {})
    adapted_by(base, tmp_path / "adapter", target_parameters=BOTH)
    weights = read(tmp_path / "base", tmp_path / "adapter")
    save_tiny(tmp_path / "other", "qwen3_moe", {"moe_intermediate_size": 40})
    with pytest.raises(ValueError, match=r"fit none of this model's experts \(gate_up_proj \[80, 32\], down_proj"):
        load(tmp_path / "other", weights)
    save_tiny(tmp_path / "tied", "llama", {"tie_word_embeddings": True})
    table = torch.ones(99, 32)
    for wholes in ({"lm_head.weight": table}, {"model.embed_tokens.weight": table, "lm_head.weight": 2 * table}):
        with pytest.raises(ValueError, match="makes embedding and head different"):
            load(tmp_path / "tied", AdapterWeights("x", {}, {}, wholes))
    both = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    model = load(tmp_path / "tied", AdapterWeights("x", {}, {}, both))
    assert torch.equal(native.unpack(model.embedding.weight), table)
    with pytest.raises(ValueError, match="the checkpoint has no such tensor"):
        load(tmp_path / "base", AdapterWeights("x", {}, {}, {"model.nothing.weight": table}))
