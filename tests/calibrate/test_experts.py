"""Experts are rounded with the rows that chose them, and written under the names that other tools use."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pace.calibrate.job import Job
from pace.calibrate.recording import CalibrationText
from pace.calibrate.rounding import fit_scales, output_error, round_to_nearest
from pace.llm import QuantizationConfig
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from pace.ops import reference
from pace.ops.protocol import ExpertOptions
from pace.ops.reference_parts.experts import sum_of_experts
from pace.ops.weight_layout import WeightLayout
from tests.calibrate.inputs import quantize_checkpoint, tokens
from tests.editing import edit_tensors
from tests.llm.models.variants import save_tiny
from tests.plugins.tiers import sample
from tests.support import prefill

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("token_ids", "one_strength")
INT4 = QuantizationConfig("int4", group=16)
TOKENS, FEW_TOKENS = tokens(24, 40), tokens(12, 24)


@pytest.fixture
def rounded(monkeypatch):
    """Part -> the weight before and after rounding, and the statistics that were used to round it."""
    found = {}

    def quantize_part(self, product, part, rows, inputs, original=Job.quantize_part):
        before = product.weight.matrix[rows].clone()
        original(self, product, part, rows, inputs)
        found[part] = before, product.weight.matrix[rows].clone(), inputs

    monkeypatch.setattr(Job, "quantize_part", quantize_part)
    return found


def load(folder, **more):
    return load_model(LoadOptions(folder, dtype="float32", backend="torch", progress=False, **more))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3"])
def test_an_expert_reads_the_rows_that_chose_it(model_type, tmp_path, monkeypatch):
    save_tiny(tmp_path, model_type, {})
    model = load(tmp_path)
    text, layer = CalibrationText(model, TOKENS), model.layers[-1]
    for earlier in model.layers[:-1]:
        text.advance(earlier)
    mixture, seen = layer.mlp, []

    def experts(self, x, gate_up, down, routing, *rest):
        seen.append((x, routing))
        return sum_of_experts(self.linear, self.linear_glu, x, gate_up, down, routing, *rest)

    monkeypatch.setattr("pace.calibrate.recording.RecordingOps.experts", experts)
    products = [*mixture.gate_up.experts, *mixture.down.experts]
    found = text.record(layer, products, with_hessian=True)
    [(x, routing)] = seen
    count, k = len(mixture.gate_up.experts), mixture.router.top_k
    for expert in range(count):
        chosen = (routing[:, :k] == expert).any(1)
        of_gate_up, of_down = found[expert], found[count + expert]
        assert of_gate_up.count == of_down.count == chosen.sum()
        if not chosen.any():
            continue
        assert torch.allclose(of_gate_up.hessian, x[chosen].T @ x[chosen], rtol=1e-4, atol=1e-3)
        alone = torch.zeros(len(x[chosen]), 2 * k)
        alone[:, 0], alone[:, 1:k] = expert, (expert + 1) % count
        hidden = []
        sum_of_experts(
            lambda rows, weight, bias: hidden.append(rows) or reference.linear(rows, weight, bias),
            reference.linear_glu,
            x[chosen], mixture.gate_up.stack, mixture.down.stack, alone[:, [0, k]],
            ExpertOptions(mixture.activation, mixture.gate_up.biases),
        )  # fmt: skip
        assert torch.allclose(of_down.hessian, hidden[0].T @ hidden[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v2"])
def test_the_error_on_the_text_is_less_than_that_of_rounding_to_the_nearest(model_type, tmp_path, rounded):
    save_tiny(tmp_path / "float", model_type, {"num_experts_per_tok": 2})
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "out", INT4, TOKENS, method="gptq")
    assert not report.met_few
    experts = {part: found for part, found in rounded.items() if ".experts." in part}
    assert len({part.partition(".experts.")[0] for part in experts}) > 0
    for part, (before, after, inputs) in experts.items():
        layout = WeightLayout("int4", 16)
        nearest = round_to_nearest(before, layout, fit_scales(before, layout, torch.ones(before.shape[1]))).dequantize()
        assert output_error(before, after, inputs.hessian) < 0.9 * output_error(before, nearest, inputs.hessian), part


def test_down_is_rounded_by_what_the_rounded_gate_and_up_give(tmp_path, rounded):
    """A text that runs through the first layers as written gives the same statistics."""
    save_tiny(tmp_path / "float", "qwen3_moe", {"num_hidden_layers": 1})
    config = QuantizationConfig("int4", group=16, embedding=None)
    windows = quantize_checkpoint(tmp_path / "float", tmp_path / "out", config, TOKENS, method="gptq").num_tokens // 40
    model = load(tmp_path / "out")
    kept = [window for index, window in enumerate(TOKENS) if (index + 1) % 8][:windows]
    assert len(kept) == windows == 21
    [layer] = model.layers
    found = CalibrationText(model, kept).record(layer, layer.mlp.down.experts, with_hessian=True)
    for expert, inputs in zip(layer.mlp.down.experts, found):
        of_job = rounded[next(iter(expert.parts))][2]
        assert of_job.count == inputs.count
        assert torch.allclose(of_job.hessian, inputs.hessian, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["gptq", "awq", "awq+gptq"])
def test_an_expert_that_few_tokens_choose(method, tmp_path, rounded):
    """No token chooses the first expert, whose bias is low. Gate and up use all experts' inputs; down has none."""
    save_tiny(tmp_path / "float", "glm4_moe", {})
    with edit_tensors(tmp_path / "float") as state:
        state["model.layers.1.mlp.gate.e_score_correction_bias"][0] = -100.0
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "out", INT4, TOKENS, method=method)
    names = [f"model.layers.1.mlp.experts.0.{part}_proj" for part in ("gate", "up", "down")]
    assert report.met_few == tuple(names) and "3 matrices of experts met too few tokens" in str(report)
    assert rounded[names[0]][2].count == report.num_tokens and rounded[names[2]][2].count == 0
    before, after, _ = rounded[names[2]]
    layout = WeightLayout("int4", 16)
    scales = fit_scales(before, layout, torch.ones(before.shape[1]))
    assert torch.equal(after, round_to_nearest(before, layout, scales).dequantize())
    assert prefill(load(tmp_path / "out"), torch.tensor(TOKENS[0])).isfinite().all()


@pytest.mark.parametrize("method", sample(["rtn", "gptq", "awq+gptq"], lambda method: method != "gptq"))
@pytest.mark.parametrize(
    ("model_type", "experts", "parts"),
    [
        ("qwen3_moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe.experts", ("w1", "w3", "w2")),
        ("gpt_oss", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("granitemoe", "block_sparse_moe.experts", ("gate_proj", "up_proj", "down_proj")),
        ("deepseek_v3", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_names(model_type, experts, parts, method, tmp_path):
    """Each expert has separate tensors. Routers stay floats, and are listed as such."""
    save_tiny(tmp_path / "float", model_type, {})
    calibrate = None if method == "rtn" else FEW_TOKENS
    quantize_checkpoint(tmp_path / "float", tmp_path / "out", INT4, calibrate, method=method)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for part in parts:
        for what in ("weight_packed", "weight_scale", "weight_shape"):
            assert f"model.layers.1.{experts}.3.{part}.{what}" in stored
    original = load_file(tmp_path / "float" / "model.safetensors")
    [router] = [name for name in original if name.startswith("model.layers.1.") and name.endswith((".gate.weight",
     "router.weight", "router.layer.weight"))]  # fmt: skip
    assert torch.equal(stored[router], original[router]) or method == "awq+gptq"
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert router.removesuffix(".weight") in ignored
    if model_type == "gpt_oss":  # gate and up are interleaved columns
        gate_up = original["model.layers.1.mlp.experts.gate_up_proj_bias"][3]
        name = f"model.layers.1.{experts}.3"
        assert torch.equal(stored[f"{name}.gate_proj.bias"], gate_up[::2]) or method == "awq+gptq"
        assert torch.equal(stored[f"{name}.up_proj.bias"], gate_up[1::2]) or method == "awq+gptq"
    if model_type == "deepseek_v3":
        name = "model.layers.1.self_attn.kv_b_proj"
        assert torch.equal(stored[f"{name}.weight"], original[f"{name}.weight"]) and name in ignored


def test_routers_choose_as_before(tmp_path):
    """Routers of a bfloat16 checkpoint are written in float32 if a migration has scaled them."""
    save_tiny(tmp_path / "float", "qwen3_moe", {}).to(torch.bfloat16).save_pretrained(tmp_path / "float")
    quantize_checkpoint(tmp_path / "float", tmp_path / "out", INT4, TOKENS, method="awq")
    stored, original = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "float"))
    name = "model.layers.0.mlp.gate.weight"
    assert original[name].dtype == torch.bfloat16 and stored[name].dtype == torch.float32
    norm = "model.layers.0.post_attention_layernorm.weight"
    s = original[norm].float() / stored[norm]
    assert (s - 1).abs().max() > 0.01, "something was scaled"
    assert torch.allclose(stored[name], original[name].float() * s, rtol=1e-5)


def test_what_makes_keys_and_values_of_latents_is_refused_by_name(tmp_path):
    save_tiny(tmp_path / "float", "deepseek_v2", {})
    config = QuantizationConfig("int4", group=16, overrides={"*.kv_b_proj": "int8"})
    with pytest.raises(NotImplementedError, match=r"'\*.kv_b_proj' asks for int8 where keys and values"):
        quantize_checkpoint(tmp_path / "float", tmp_path / "out", config, method="rtn")
    assert not (tmp_path / "out").exists()


def test_experts_of_one_form_and_another_are_the_same(tmp_path):
    """Checkpoints with the same experts, fused or one by one, give the same result."""
    save_tiny(tmp_path / "apart", "qwen3_moe", {})
    state = load_file(tmp_path / "apart" / "model.safetensors")
    (tmp_path / "fused").mkdir()
    for layer in range(2):
        of = {
            part: [state.pop(f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight") for expert in range(8)]
            for part in ("gate", "up", "down")
        }
        name = f"model.layers.{layer}.mlp.experts"
        state[f"{name}.gate_up_proj"] = torch.cat([torch.stack(of["gate"]), torch.stack(of["up"])], 1)
        state[f"{name}.down_proj"] = torch.stack(of["down"])
    save_file(state, tmp_path / "fused" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "fused" / "config.json").write_bytes((tmp_path / "apart" / "config.json").read_bytes())
    found = []
    for form in ("apart", "fused"):
        quantize_checkpoint(tmp_path / form, tmp_path / f"{form}-out", INT4, FEW_TOKENS, method="awq+gptq")
        found.append(load_file(tmp_path / f"{form}-out" / "model.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_few_hessians_at_a_time_give_the_same(tmp_path, monkeypatch):
    save_tiny(tmp_path / "float", "qwen3_moe", {})
    files = []
    for size in (1, 1 << 30):
        monkeypatch.setattr("pace.calibrate.job.HESSIANS_BYTES", size)
        quantize_checkpoint(tmp_path / "float", tmp_path / f"out-{size}", INT4, FEW_TOKENS, method="gptq")
        files.append((tmp_path / f"out-{size}" / "model.safetensors").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq+gptq"])
def test_weights_that_are_no_numbers_are_refused_by_name(method, tmp_path):
    """They would make the statistics of inputs useless."""
    save_tiny(tmp_path / "float", "qwen3_moe", {})
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    with edit_tensors(tmp_path / "float") as state:
        state[name][3, 3] = float("nan")
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
        calibrate = None if method == "rtn" else FEW_TOKENS
        quantize_checkpoint(tmp_path / "float", tmp_path / "out", INT4, calibrate, method=method)
    assert not (tmp_path / "out").exists()
