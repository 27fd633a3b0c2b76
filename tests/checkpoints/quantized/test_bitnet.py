"""BitNet checkpoints: products against transformers' layers, whole models, and files of every form."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from transformers import BitNetQuantConfig
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights, replace_with_bitnet_linear

from pace.checkpoints.quantized.bitnet import TERNARY
from pace.checkpoints.quantized.reader import QuantizedCheckpoint
from pace.checkpoints.quantized.registry import read_quant_method
from pace.checkpoints.reader import CheckpointReader
from pace.llm import LLMModel, SamplingConfig
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from pace.ops import reference
from tests.checkpoints.quantized.models import save_quantized
from tests.editing import change_json, edit_tensors
from tests.llm.models.variants import save_tiny

FORMS = {
    "bitlinear": {},
    "autobitlinear": {"linear_class": "autobitlinear"},
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
    "floats": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
}
"""Name -> fields of quantization_config. "floats" has its levels as floats."""
LINEAR = ("_proj.weight",)


@pytest.fixture(autouse=True)
def eager():
    """transformers compiles parts of these layers."""
    with torch.compiler.set_stance("force_eager"):
        yield


def ternary_state(state: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of a form, made of those of a float model."""
    found = dict(state)
    for name, weight in state.items():
        if not name.endswith(LINEAR) or form == "online":
            continue
        mean = weight.abs().mean()
        levels = (weight / mean).round().clamp(-1, 1)
        found[name] = levels if form == "floats" else pack_weights(levels.clone())
        found[f"{name}_scale"] = (1 / mean if form == "bitlinear" else mean).view(1)
    return found


def save_form(folder, form, **fields):
    """Writes a checkpoint, and returns transformers' model with the same weights."""
    theirs = save_tiny(folder, "bitnet", fields)
    with edit_tensors(folder) as state:
        state |= ternary_state(state, form)
    change_json(folder / "config.json", quantization_config={"quant_method": "bitnet", **FORMS[form]})
    theirs = replace_with_bitnet_linear(theirs, ["lm_head"], BitNetQuantConfig(**FORMS[form]))
    for name, module in theirs.named_modules():
        if isinstance(module, (BitLinear, AutoBitLinear)):
            weight, scale = state[f"{name}.weight"], state.get(f"{name}.weight_scale")
            if isinstance(module, BitLinear):
                module.weight, module.dtype = weight, torch.float32
            else:
                levels = weight if weight.dtype != torch.uint8 else unpacked(weight)
                module.weight = torch.nn.Parameter(levels, requires_grad=False)
            if scale is not None:
                module.weight_scale = scale
    return theirs.eval()


def unpacked(packed):
    return torch.cat([(packed >> 2 * plane & 3).float() - 1 for plane in range(4)])


def matrices(folder):
    config = json.loads((folder / "config.json").read_text())
    return QuantizedCheckpoint(CheckpointReader(folder), read_quant_method(config["quantization_config"]))


@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_transformers(form, tmp_path):
    """The codes of inputs and weights are the same, and sums of products are exact here. transformers may add scaled
    inputs, each rounded up to 3 times. The result is rounded 3 times. Errors of K terms add up like a random walk."""
    theirs = save_form(tmp_path, form)
    reader = matrices(tmp_path)
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        layer = theirs.model.layers[1].get_submodule(name)
        rows = reader.read(f"model.layers.1.{name}.weight")
        assert rows.layout == TERNARY and reader.tensors[f"model.layers.1.{name}.weight"].dtype == TERNARY
        n, k = rows.shape
        weight = reference.empty_weight(n, k, TERNARY)
        reference.pack_quantized_(weight, rows, 0)
        x = torch.randn(9, k) * torch.logspace(-7, 2, 9)[:, None]
        found, expected = reference.linear(x, weight), layer(x)
        magnitude = x.abs().amax(1, keepdim=True).clamp(min=1e-5) * rows.dequantize().abs().sum(1)
        assert ((found - expected).abs() <= 6 * 2.0**-24 * (magnitude + 1e-30) * k**0.5).all(), name


@pytest.mark.parametrize("form", FORMS)
def test_models_are_those_of_transformers(form, tmp_path):
    """Activations of two models differ by about 2^-20, so that one code in 2^20 / 127 is rounded to another side. That
    is one row of 64 in a hundred. Such a row differs by a step of 1 / 127 in one of 64 terms. So most rows are equal,
    and the mean difference is small."""
    theirs = save_form(tmp_path, form)
    ids = torch.randint(2, 99, (45,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    for backend in ("torch", "native"):
        with LLMModel(tmp_path, dtype="float32", backend=backend, num_threads=1, progress=False) as ours:
            with ours.session() as session:
                found = session.append(ids, logits="all")
            difference = (found - expected).norm(dim=1) / expected.norm(dim=1)
            assert difference.median() < 1e-4 and difference.mean() < 1e-2, (backend, difference)


def test_rows_come_in_any_pieces(tmp_path):
    for form in FORMS:
        save_form(tmp_path / form, form)
        reader = matrices(tmp_path / form)
        name = "model.layers.0.mlp.gate_proj.weight"
        whole, (n, _) = reader.read(name).dequantize(), reader.tensors[name].shape
        assert set((whole / whole.max()).unique().tolist()) == {-1.0, 0.0, 1.0}
        for start, stop in ((0, 1), (n // 4 - 1, n // 2 + 1), (5, n), (n, n)):
            assert torch.equal(reader.read(name, start, stop).dequantize(), whole[start:stop]), (form, start, stop)
        reader.release(name)


def test_rows_are_the_same_bits_however_they_are_batched(tmp_path):
    save_form(tmp_path, "autobitlinear")
    prompts = [[5, 6, 7], list(range(2, 40)), [9] * 17]
    config = SamplingConfig(max_new_tokens=9, do_sample=False, ignore_eos=True, logprobs=0)
    with LLMModel(tmp_path, dtype="float32", num_threads=2, progress=False) as model:
        together = model.generate(prompts, config)
        for index, prompt in enumerate(prompts):
            alone = model.generate([prompt], config)
            assert alone.generated_token_ids[0] == together.generated_token_ids[index]
            assert alone.logprobs[0] == together.logprobs[index]


def test_other_families_round_their_inputs_too(tmp_path):
    """The method of a checkpoint does not depend on its family."""
    folder = save_quantized(tmp_path, "bitnet", "llama")
    ids = [3, 14, 15, 92, 65, 35]
    plain = load_model(LoadOptions(folder, dtype="float32", backend="torch", progress=False))
    assert {layout for matrix in plain.matrices() for layout in matrix.plan.layouts.values()} == {TERNARY}
    with LLMModel(folder, dtype="float32", progress=False) as model:
        assert len(model.generate(ids, SamplingConfig(max_new_tokens=4, ignore_eos=True)).generated_token_ids[0]) == 4


def test_online_keeps_modules_by_pattern(tmp_path):
    save_form(tmp_path, "online")
    config = json.loads((tmp_path / "config.json").read_text())
    for patterns, kept in (
        (None, set()),
        (["lm_head", "model.layers.1"], {"model.layers.1"}),
        (["down_proj", "model.layers.*.self_attn.q_proj"], {"mlp.down_proj", "self_attn.q_proj"}),
    ):
        config["quantization_config"]["modules_to_not_convert"] = patterns
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name, (dtype, _) in matrices(tmp_path).tensors.items():
            if name.endswith(LINEAR):
                assert (dtype == TERNARY) == (not any(part in name for part in kept)), (patterns, name)
            else:
                assert dtype == torch.float32


def test_what_is_damaged_is_refused(tmp_path):
    save_form(tmp_path / "floats", "floats")
    state = load_file(tmp_path / "floats" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for damage, message in (
        ({name: state[name] + 0.5}, "must hold only -1, 0 and 1"),
        ({f"{name}_scale": torch.tensor([float("nan")])}, "weight_scale' holds nan"),
        ({f"{name}_scale": torch.ones(3)}, "weight_scale' is float32 of shape \\[3\\]"),
        ({name: torch.ones(3, 4, dtype=torch.int32)}, "up_proj.weight' is int32"),
    ):
        save_file(state | damage, tmp_path / "floats" / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            matrices(tmp_path / "floats").read(name)
    save_form(tmp_path / "zero", "bitlinear")
    with edit_tensors(tmp_path / "zero") as state:
        state[f"{name}_scale"] = torch.zeros(1)
    with pytest.raises(ValueError, match="holds inf"):
        matrices(tmp_path / "zero").read(name)
