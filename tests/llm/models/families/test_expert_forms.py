"""All forms in which checkpoints store experts give the same model, bit for bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from pace.llm import LLMModel
from pace.llm.layers import MixtureOfExperts
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from pace.quant import QuantizationConfig
from tests.checkpoints.quantized import packers
from tests.checkpoints.quantized.models import save_quantized
from tests.editing import change_json, change_tensors
from tests.llm.models.references import MODELS
from tests.llm.models.variants import ROUTED, save_tiny

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]


def logits(folder, **options):
    with LLMModel(folder, progress=False, **{"dtype": "float32"} | options) as model, model.session() as session:
        return session.append(IDS, logits="all")


def stack(state, names):
    """Removes tensors from `state` and returns them stacked."""
    return torch.stack([state.pop(name) for name in names])


@pytest.fixture
def qwen(tmp_path):
    save_tiny(tmp_path, "qwen3_moe", {})
    return tmp_path


PARTS = ("gate", "up", "down")
LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def numbers_of(state, experts):
    return range(sum(name.startswith(experts) and name.endswith("down_proj.weight") for name in state))


def fuse(state):
    for experts in LAYERS:
        numbers = numbers_of(state, experts)
        gate, up, down = (stack(state, [f"{experts}.{e}.{part}_proj.weight" for e in numbers]) for part in PARTS)
        state |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), f"{experts}.down_proj": down}
    return state


def stack_apart(state):
    for experts in LAYERS:
        numbers = numbers_of(state, experts)
        for part in PARTS:
            state[f"{experts}.{part}_proj.weight"] = stack(
                state, [f"{experts}.{e}.{part}_proj.weight" for e in numbers]
            )
    return state


@pytest.mark.parametrize("change", [fuse, stack_apart])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int4"}], ids=str)
def test_stacked_experts_are_those_of_a_tensor_each(qwen, change, options):
    expected = logits(qwen, **options)
    change_tensors(qwen, change)
    assert not any(".experts.0." in name for name in load_file(qwen / "model.safetensors"))
    assert torch.equal(logits(qwen, **options), expected)


def test_stacks_of_float8_are_those_of_a_tensor_each(tmp_path):
    """Weights have a scale per block. An expert stores gate first, then up; its scales have the same order."""
    folder = save_quantized(tmp_path, "fp8", "qwen3_moe", num_experts=3)

    def fuse_float8(state):
        state = {
            name: tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor for name, tensor in state.items()
        }
        scales = {
            name.replace("_scale_inv", ""): state.pop(name)
            for name in list(state)
            if "experts" in name and "scale" in name
        }
        state = fuse(state) | {f"{name}_scale_inv": tensor for name, tensor in fuse(scales).items()}
        return {
            name: tensor.view(torch.float8_e4m3fn) if tensor.dtype == torch.uint8 else tensor
            for name, tensor in state.items()
        }

    for options in ({}, {"backend": "torch"}, {"weights": "mapped"}):
        expected = logits(folder, **options)
        state = load_file(folder / "model.safetensors")
        change_tensors(folder, fuse_float8)
        assert "model.layers.0.mlp.experts.down_proj_scale_inv" in load_file(folder / "model.safetensors")
        assert torch.equal(logits(folder, **options), expected)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_mixtral_as_it_was_published_and_as_transformers_5_calls_it(tmp_path):
    save_tiny(tmp_path, "mixtral", {})
    expected = logits(tmp_path)
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

    def rename(state):
        new = {}
        for name, tensor in state.items():
            name = name.replace("block_sparse_moe", "mlp")
            for old, here in names.items():
                name = name.replace(f".{old}.weight", f".{here}.weight")
            new[name] = tensor
        return new

    assert any("block_sparse_moe.experts.0.w1" in name for name in load_file(tmp_path / "model.safetensors"))
    change_tensors(tmp_path, rename)
    assert torch.equal(logits(tmp_path), expected)
    change_tensors(tmp_path, fuse)
    assert torch.equal(logits(tmp_path), expected)


def test_phi_as_it_was_published_and_as_transformers_5_calls_it(tmp_path):
    save_tiny(tmp_path, "phimoe", {})
    expected = logits(tmp_path)
    names = {"block_sparse_moe.gate": "mlp.router", "block_sparse_moe": "mlp"}
    names |= {".w1.weight": ".gate_proj.weight", ".w3.weight": ".up_proj.weight", ".w2.weight": ".down_proj.weight"}

    def rename(state):
        new = {}
        for name, tensor in state.items():
            for old, here in names.items():
                name = name.replace(old, here)
            new[name] = tensor
        return new

    assert any("block_sparse_moe.experts.0.w1" in name for name in load_file(tmp_path / "model.safetensors"))
    change_tensors(tmp_path, rename)
    change_tensors(tmp_path, fuse)
    assert torch.equal(logits(tmp_path), expected)


SPLIT_OTHERWISE = ("bailing_hybrid", "kimi_linear", "lara_mini", "sarvam_moe")
"""Families for which transformers splits or joins tensors of attention, too, unlike any published checkpoint."""


@pytest.mark.parametrize("model_type", sorted(set(ROUTED) - set(MODELS) - set(SPLIT_OTHERWISE)))
def test_every_mixture_as_transformers_5_holds_it(tmp_path, model_type):
    """transformers 5 has its own names of stacks and routers, and writes them if `save_original_format` is False."""
    theirs = save_tiny(tmp_path / "published", model_type, {})
    theirs.save_pretrained(tmp_path / "own", save_original_format=False)
    assert torch.equal(logits(tmp_path / "own"), logits(tmp_path / "published"))


@pytest.mark.parametrize("model_type", sorted(ROUTED))
def test_a_pattern_finds_the_experts_of_every_mixture(tmp_path, model_type):
    save_tiny(tmp_path, model_type, {})
    config = QuantizationConfig("int8", overrides={"*.experts.*": "int4"})
    model = load_model(LoadOptions(tmp_path, dtype="bfloat16", backend="native", quantization=config, progress=False))
    [mixture, *_] = (layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts))
    held = [str(stack.storage(torch.bfloat16)) for stack in (mixture.gate_up, mixture.down)]
    assert all(layout.startswith("int4") for layout in held)
    assert mixture.gate.weight.layout == torch.float32
    if mixture.shared is not None:
        assert str(mixture.shared.down.weight.layout).startswith("int8")


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int4"}], ids=str)
def test_llama_4_with_a_tensor_for_each_expert(tmp_path, options):
    """Compares the published form (transposed, one tensor for all experts) with one tensor per expert, as in
    checkpoints whose experts are quantised one by one."""
    save_tiny(tmp_path, "llama4_text", {"num_hidden_layers": 2})
    expected = logits(tmp_path, **options)

    def take_apart(state):
        for layer in range(2):
            experts = f"model.layers.{layer}.feed_forward.experts"
            gate, up = state.pop(f"{experts}.gate_up_proj").transpose(1, 2).chunk(2, dim=1)
            parts = {"gate": gate, "up": up, "down": state.pop(f"{experts}.down_proj").transpose(1, 2)}
            state |= {f"{experts}.{e}.{part}_proj.weight": stack[e] for part, stack in parts.items() for e in range(6)}
        return state

    change_tensors(tmp_path, take_apart)
    assert torch.equal(logits(tmp_path, **options), expected)


def test_an_expert_that_is_missing_is_named(qwen):
    change_tensors(qwen, lambda state: {k: v for k, v in state.items() if "layers.1.mlp.experts.3.up_proj" not in k})
    with pytest.raises(ValueError, match=r"missing \(1\): model.layers.1.mlp.experts.3.up_proj.weight"):
        logits(qwen)


def test_stacks_of_another_size_are_refused(qwen):
    change_tensors(qwen, fuse)
    name = "model.layers.0.mlp.experts.down_proj"
    change_tensors(qwen, lambda state: state | {name: state[name][:-1]})
    with pytest.raises(ValueError, match=rf"{name} has shape \[7, 32, 24\], the config demands \[8, 32, 24\]"):
        logits(qwen)


# -- gpt-oss: transposed with interleaved gate and up, or MXFP4


@pytest.fixture
def gpt_oss(tmp_path):
    save_tiny(tmp_path, "gpt_oss", {"hidden_size": 64, "intermediate_size": 96})
    return tmp_path


def in_mxfp4(folder):
    """Replaces the experts by random MXFP4 codes. Returns their values as floats under the same names."""
    floats = {}

    def change(state):
        for layer in range(3):
            for part, (rows, k) in {"gate_up_proj": (192, 64), "down_proj": (64, 96)}.items():
                name = f"model.layers.{layer}.mlp.experts.{part}"
                del state[name]
                packed = [packers.mxfp4(rows, k) for _ in range(6)]
                for ending in ("blocks", "scales"):
                    key = next(key for key in packed[0][0] if key.endswith(ending))
                    state[f"{name}_{ending}"] = torch.stack([tensors[key] for tensors, _ in packed])
                floats[name] = torch.stack([weight.float() for _, weight in packed]).transpose(1, 2)
        return state

    change_tensors(folder, change)
    change_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return floats


def test_mxfp4_stacks_are_their_values(gpt_oss, tmp_path_factory):
    floats_too = tmp_path_factory.mktemp("floats")
    (floats_too / "config.json").write_text((gpt_oss / "config.json").read_text())
    state = load_file(gpt_oss / "model.safetensors")
    values = in_mxfp4(gpt_oss)
    state = {name: tensor.contiguous() for name, tensor in (state | values).items()}
    save_file(state, floats_too / "model.safetensors", metadata={"format": "pt"})
    found = logits(gpt_oss, backend="torch")
    expected = logits(floats_too, backend="torch")
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_mxfp4_stacks_stay_as_they_are_beside_what_is_quantised_now(gpt_oss):
    in_mxfp4(gpt_oss)
    model = load_model(LoadOptions(gpt_oss, dtype="bfloat16", backend="native", progress=False))
    experts = model.layers[0].mlp.gate_up
    assert str(experts.storage(torch.bfloat16)).startswith("mxfp4")
    assert len({str(expert.plan.layouts) for expert in experts.experts}) == 6  # different parts, one layout
    with LLMModel(gpt_oss, quantization=QuantizationConfig("int8"), progress=False) as quantised:
        with quantised.session() as session:
            assert session.append(IDS, logits="all").isfinite().all()


# -- effect of QuantizationConfig


def test_routers_are_never_quantised(qwen):
    model = load_model(LoadOptions(qwen, dtype="bfloat16", backend="native", quantization="int4", progress=False))
    mixture = model.layers[0].mlp
    assert mixture.gate.weight.layout == torch.float32
    assert all(str(stack.storage(torch.bfloat16)).startswith("int4") for stack in (mixture.gate_up, mixture.down))


def test_experts_told_apart_become_floats_together(qwen, caplog):
    config = QuantizationConfig("int4", overrides={"*.experts.3.down_proj": "int8"})
    model = load_model(LoadOptions(qwen, dtype="bfloat16", backend="native", quantization=config, progress=False))
    assert model.layers[0].mlp.down.storage(torch.bfloat16) == torch.bfloat16
    assert "model.layers.0.mlp.experts.0.down_proj" in caplog.text
