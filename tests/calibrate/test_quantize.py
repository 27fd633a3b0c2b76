"""`quantize_checkpoint` and `pace quantize`: for every architecture, the loaded weights are those written, and they are
better than without a calibration text."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pace.assets import TINY
from pace.calibrate import METHODS, quantize
from pace.calibrate.job import Job
from pace.calibrate.method import read_method
from pace.calibrate.parts import rows_of_tensors
from pace.calibrate.report import Quality
from pace.calibrate.texts import choose_windows
from pace.cli import main
from pace.eval import Evaluation
from pace.llm import LLMModel, QuantizationConfig, SamplingConfig
from pace.llm.loading.load import load_model as load_layers
from pace.llm.loading.options import LoadOptions
from pace.ops import native
from pace.ops.weight_layout import WeightLayout
from pace.quant import Int8
from tests.calibrate.inputs import quantize_checkpoint, texts, tokens
from tests.editing import edit_tensors
from tests.llm.models.parts import representative, with_new_parts
from tests.llm.models.variants import IDS, ROUTED, VARIANTS, save_tiny
from tests.plugins.tiers import quarter
from tests.support import prefill

pytest.importorskip("transformers")


@pytest.fixture
def written(monkeypatch):
    """Module -> the weight that replaced it in the float model once it was written, for the rest of the calibration."""
    found = {}

    def quantize_part(self, product, part, rows, inputs, original=Job.quantize_part):
        original(self, product, part, rows, inputs)
        found[part] = product.weight.matrix[rows].clone()

    monkeypatch.setattr(Job, "quantize_part", quantize_part)
    return found


EVERYWHERE = ("awq+gptq", "smoothquant")
"""The methods that calibrate every architecture."""

REFUSED = ("gpt2", "lara_mini")
"""Families that are refused: their tensors hold columns, or rows of several matrices."""


def is_quantised(matrix) -> bool:
    """False for routers and for the projection from latents to keys and values, which stay floats."""
    return not matrix.keeps_floats and not any(part.endswith("kv_b_proj") for part in matrix.parts)


def distance(found, exact, model_type) -> float:
    """Relative distance between logits over all rows. For mixtures it is the median over rows, because a token that
    goes to another expert is far off."""
    if model_type not in ROUTED:
        return ((found - exact).norm() / exact.norm()).item()
    return ((found - exact).norm(dim=1) / exact.norm(dim=1)).median().item()


# -- every architecture ------------------------------------------------------------------------------------------------


def cases() -> list[Any]:
    """Variants with methods. A variant with a part that no earlier variant has is tested in every run, with the methods
    in turn. Other representative variants are tested in some runs."""
    found = []
    for index, name in enumerate(IDS):
        marks = [pytest.mark.thorough] * 2
        if name in with_new_parts():
            marks[(index + quarter()) % 2] = ()
        elif name in representative():
            marks = [pytest.mark.rotates] * 2
        found += [pytest.param(name, method, marks=mark) for method, mark in zip(EVERYWHERE, marks)]
    return found


@pytest.mark.parametrize(("name", "method"), cases())
def test_every_architecture(name, method, tmp_path, written, token_ids, one_strength):
    """The loaded weights are, bit for bit, those that the calibration continued with. The logits are those of a float
    model with these weights."""
    model_type, _, fields = VARIANTS[IDS.index(name)]
    save_tiny(tmp_path / "float", model_type, fields)
    code = "int4" if method == "awq+gptq" else "int8"
    config = QuantizationConfig(code, group=16) if code == "int4" else QuantizationConfig(code)
    vocab_size = fields.get("output_vocab_size", 99)
    rows = tokens(12, 24, vocab_size=vocab_size)
    if model_type in REFUSED:
        with pytest.raises(NotImplementedError, match="holds columns, or rows of several matrices"):
            quantize_checkpoint(tmp_path / "float", tmp_path / "out", config, rows, method=method)
        return
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "out", config, rows, method=method)
    assert report.num_tokens == 11 * 24 and report.bytes_after < report.bytes_before

    loaded = load_layers(LoadOptions(tmp_path / "out", dtype="float32", backend="torch", progress=False))
    inside = [matrix for layer in loaded.layers for matrix in layer.matrices() if is_quantised(matrix)]
    assert {name for matrix in inside for name in matrix.tensors()} == {f"{part}.weight" for part in written}
    for matrix in inside:
        assert matrix.weight.layout.code == code
        for name, rows in rows_of_tensors(matrix).items():
            assert torch.equal(matrix.weight.matrix[rows], written[name.removesuffix(".weight")])
    ids = torch.tensor(tokens(1, 30, seed=1, vocab_size=vocab_size)[0])
    logits = prefill(loaded, ids)
    floats = LoadOptions(tmp_path / "float", dtype="float32", backend="torch", progress=False)
    exact = prefill(load_layers(floats), ids)
    bound = 0.05 if code == "int8" else 0.5
    if model_type in ROUTED or len(loaded.layers) > 2 or loaded.kv_spec.has_states:
        bound = max(
            bound,
            2
            * distance(prefill(load_layers(dataclasses.replace(floats, quantization=config)), ids), exact, model_type),
        )
    assert 0 < distance(logits, exact, model_type) < bound  # a missing scale would move them further

    native = LLMModel(tmp_path / "out", dtype="float32", progress=False)
    text = native.generate([tokens(1, 9, vocab_size=vocab_size)[0]], SamplingConfig(max_new_tokens=5, ignore_eos=True))
    assert len(text.generated_token_ids[0]) == 5


# -- the bundled model -------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_other_tools_read(tmp_path):
    quantize_checkpoint(TINY, tmp_path / "out", QuantizationConfig("int4", group=32), texts(300, 20), method="gptq")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    described = config.pop("quantization_config")
    assert config == json.loads((TINY / "config.json").read_text())
    assert described["quant_method"] == "compressed-tensors" and described["format"] == "mixed-precision"
    four, eight = described["config_groups"].values()
    assert four["targets"] == ["Linear"] and four["format"] == "pack-quantized" and four["weights"]["group_size"] == 32
    assert eight["targets"] == ["model.embed_tokens", "lm_head"] and eight["input_activations"] is None
    assert eight["format"] == "int-quantized" and eight["weights"]["strategy"] == "channel"

    stored, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(TINY / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    assert stored[f"{name}.weight_shape"].tolist() == [256, 256]
    assert stored[f"{name}.weight_scale"].dtype == torch.bfloat16
    words, scales = stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"].float()
    codes = torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], dim=-1).flatten(1) - 8
    values, exact = codes * scales.repeat_interleave(32, dim=1), original[f"{name}.weight"].float()
    assert (values - exact).abs().max() < 4 * scales.abs().max()
    assert torch.corrcoef(torch.stack([values.flatten(), exact.flatten()]))[0, 1] > 0.98
    name = "model.embed_tokens.weight"
    embedding, step = stored[name].float() * stored[f"{name}_scale"], stored[f"{name}_scale"].max()
    assert (embedding - original[name].float()).abs().max() < step
    assert torch.equal(stored["model.norm.weight"], original["model.norm.weight"])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in TINY.iterdir()}


@pytest.mark.parametrize(
    "config, tied, tolerance",
    [
        pytest.param(QuantizationConfig("int4", group=32, embedding=None), True, 1e-5, id="tied, a float embedding"),
        pytest.param(QuantizationConfig("int4", group=32), True, 1e-5, id="tied, an int8 embedding"),
        pytest.param(QuantizationConfig("int8"), True, 0.1, id="tied, int8"),
        pytest.param(QuantizationConfig("int4", group=32, lm_head=None), False, 1e-5, id="int8 embedding beside int4"),
        pytest.param(QuantizationConfig("int4", group=32), False, 0.05, id="and an int8 head"),
        pytest.param(QuantizationConfig("int8"), False, 0.1, id="int8"),
    ],
)
def test_transformers_reads_it(config, tied, tolerance, tmp_path, token_ids):
    """transformers reads the checkpoint with its default settings. Its int8 products round their inputs with one scale
    per token, an error of 0.5 to 1 % each; without int8 its results are exact."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    save_tiny(tmp_path / "float", "llama", {**sizes, **heads, "tie_word_embeddings": tied})
    quantize_checkpoint(tmp_path / "float", tmp_path / "out", config, method="rtn")
    [ids] = tokens(1, 30)
    ours = prefill(
        load_layers(LoadOptions(tmp_path / "out", dtype="float32", backend="torch", progress=False)), torch.tensor(ids)
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(torch.tensor([ids])).logits[0] - ours).norm() <= tolerance * ours.norm()


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(QuantizationConfig("int4"), id="int4"),
        pytest.param(
            QuantizationConfig("int4", group=32, embedding="int4", overrides={"*.down_proj": None}), id="some"
        ),
        pytest.param(QuantizationConfig("int4", group=None), id="int4 of rows"),
        pytest.param(QuantizationConfig("int8"), id="int8"),
        pytest.param(QuantizationConfig("int8", group=32), id="int8 of groups"),
    ],
)
@pytest.mark.parametrize("small", [False, True], ids=["usual weights", "weights of 1e-7"])
def test_rtn_writes_what_quantising_at_load_does(config, small, tmp_path):
    """Every matrix has the same bits, even if scales are too small for float16."""
    source = TINY
    if small:
        source = shutil.copytree(TINY, tmp_path / "small")
        with edit_tensors(source) as state:
            state |= {name: 1e-7 * tensor for name, tensor in state.items()}
    quantize_checkpoint(source, tmp_path / "out", config, method="rtn")
    at_load = load_layers(LoadOptions(source, quantization=config, progress=False))
    from_file = load_layers(LoadOptions(tmp_path / "out", progress=False))
    compared = 0
    for ours, theirs in zip(from_file.matrices(), at_load.matrices(), strict=True):
        assert ours.weight.layout == theirs.weight.layout
        assert torch.equal(native.unpack(ours.weight), native.unpack(theirs.weight)), ours.parts
        compared += isinstance(ours.weight.layout, WeightLayout)
    assert compared > 10
    ids = torch.tensor(tokens(1, 30)[0])
    assert torch.equal(prefill(from_file, ids), prefill(at_load, ids))


def test_the_same_arguments_give_the_same_file(tmp_path, token_ids):
    save_tiny(tmp_path / "float", "llama", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1})
    for name in ("a", "b"):
        quantize_checkpoint(tmp_path / "float", tmp_path / name, "int4", tokens(12, 24))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_without_a_text_weights_are_rounded_to_the_nearest(tmp_path):
    config = QuantizationConfig("int8", overrides={"*.down_proj": None})
    report = quantize_checkpoint(TINY, tmp_path / "out", config, method="rtn")
    assert report.quality is None and report.num_tokens == 0 and report.method == "rtn"
    stored, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(TINY / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    rows = Int8().quantize(original[f"{name}.weight"])
    assert torch.equal(stored[f"{name}.weight"], rows.codes)
    assert torch.equal(stored[f"{name}.weight_scale"], rows.scales)
    kept = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(stored[kept], original[kept])
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert described["ignore"] == [f"model.layers.{i}.mlp.down_proj" for i in range(5)]


def test_the_command(tmp_path, capsys):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(200, 32)), encoding="utf-8")
    out = str(tmp_path / "out")
    options = ["--group", "32", "--method", "gptq", "--keep", "*.o_proj", "--json"]
    assert main(["quantize", str(TINY), out, "--calibrate", str(text), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["out"] == out and report["method"] == "gptq" and report["bytes_after"] < 0.5 * report["bytes_before"]
    calibrated, uncalibrated = report["quality"]["calibrated"], report["quality"]["uncalibrated"]
    assert 0 < calibrated["kl_divergence"] < uncalibrated["kl_divergence"]
    assert calibrated["num_tokens"] == uncalibrated["num_tokens"] > 100
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.self_attn.o_proj.weight" in stored
    assert stored["model.layers.0.mlp.up_proj.weight_scale"].shape[1] == 8
    assert main(["quantize", str(TINY), str(tmp_path / "eight"), "--format", "int8", "--calibrate", str(text)]) == 0
    shown = capsys.readouterr().out
    assert "smoothquant" in shown and "quantised at load" in shown and "KL divergence" in shown
    assert main(["generate", "--model", out, "--chat", "What is the capital of Japan?"]) == 0
    assert "Tokyo" in capsys.readouterr().out


@pytest.mark.parametrize("length", [100, 300_000])
def test_of_a_huge_text_pieces_are_tokenised(length, monkeypatch):
    """There are more pieces than needed, evenly spread. A text that is not much longer than needed stays whole."""
    encoded = []
    monkeypatch.setattr("pace.calibrate.texts.encode", lambda rows, *arguments: encoded.extend(rows) or rows)
    model = load_layers(LoadOptions(TINY, backend="torch", progress=False))
    rows = [list(range(start, start + length)) for start in range(0, 20 * length, length)]
    seen, kept = choose_windows(rows, None, model, 50, 2000)
    if length == 100:
        assert encoded == rows
    else:
        assert 20_000 < sum(map(len, encoded)) <= 2000 * 16 * 8 // 7
        gaps = [second[0] - first[0] for first, second in zip(encoded, encoded[1:])]
        assert encoded[0][0] == 0 and max(gaps) < 1.1 * min(gaps) and 20 * length - encoded[-1][-1] <= max(gaps)
    assert 1500 <= sum(map(len, seen)) <= 2050 and kept


def test_a_report_that_there_is_no_memory_for_does_not_cost_the_checkpoint(tmp_path, monkeypatch, caplog):
    def fail(*arguments):
        raise MemoryError("the weights take 14.2 GiB as bfloat16")

    monkeypatch.setattr(quantize, "compare_models", fail)
    report = quantize_checkpoint(TINY, tmp_path / "out", "int8", texts(0, 60), method="rtn", report=True)
    told = "out is written and whole, but could not be compared with bfloat16: the weights take 14.2 GiB"
    assert report.quality is None and told in caplog.text
    assert str(report).endswith("\nnot compared with bfloat16: the weights take 14.2 GiB as bfloat16")
    assert load_layers(LoadOptions(tmp_path / "out", backend="torch", progress=False)).num_weights


@pytest.mark.parametrize(
    ("num_tokens", "method", "num_compared"),
    [(256, "gptq", 0), (300, "gptq", 0), (320, "gptq", 64), (400, "awq", 64), (256, "rtn", 256), (640, "gptq", 64)],
)
def test_a_comparison_is_made_or_the_report_says_why_not(tmp_path, token_ids, num_tokens, method, num_compared):
    """One window even of a short text is kept for the comparison, if enough remain to calibrate on."""
    rows = tokens(1, num_tokens)
    save_tiny(tmp_path / "float", "llama", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1})
    report = quantize_checkpoint(
        tmp_path / "float", tmp_path / "out", "int8" if method == "rtn" else "int4", rows, method=method, context=64,
        report=True,
    )  # fmt: skip
    if num_compared:
        assert report.not_compared is None and "not compared" not in str(report)
        assert num_compared - 5 <= report.quality.calibrated.num_tokens < num_compared
        assert (report.num_tokens == 0) if method == "rtn" else (256 <= report.num_tokens < num_tokens)
    else:
        assert report.quality is None and report.num_tokens >= num_tokens
        assert "not compared with bfloat16: the text is too short" in str(report)


def test_why_there_is_no_comparison(tmp_path, capsys, monkeypatch):
    """The last line of the command's output and its JSON give the reason, except if the comparison was turned off."""
    command = ["quantize", str(TINY), "--format", "int8", "--method", "rtn"]
    assert main([*command, str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not compared with bfloat16: no text was given"
    assert main([*command, str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_compared"] == "no text was given"
    assert main([*command, str(tmp_path / "c"), "--no-report"]) == 0
    assert "compared" not in capsys.readouterr().out


def test_the_order_of_columns_has_an_effect():
    assert [read_method("gptq", order).act_order for order in (None, True, False)] == [True, True, False]


def test_a_text_for_the_report_alone(tmp_path):
    report = quantize_checkpoint(TINY, tmp_path / "out", "int8", texts(0, 20), method="rtn", report=True)
    assert report.num_tokens == 0 and "calibrated on" not in str(report) and report.quality.calibrated.num_tokens > 50
    speeds = report.quality.decode_tokens_per_second
    assert set(speeds) == {"bfloat16", "uncalibrated", "calibrated"} and min(speeds.values()) > 0
    *_, names, floats, at_load, rtn, advice = str(report).splitlines()
    assert names.split()[-1] == "tokens/s" and advice == f"advice: {report.quality.advice}"
    for line, name in ((floats, "bfloat16"), (at_load, "uncalibrated"), (rtn, "calibrated")):
        assert line.endswith(f" {speeds[name]:,.1f}")


@pytest.mark.parametrize(
    ("agreement", "divergences", "speeds", "words"),
    [
        (0.95, (0.02, 0.01), (10, 20), "use it in place of the original"),
        (0.95, (0.01, 0.01), (10, 20), "use it in place of the original"),
        (0.85, (0.02, 0.01), (10, 20), "it is far from bfloat16: take int8"),
        (0.95, (0.01, 0.02), (10, 20), "the format at load (--quantization) is closer"),
        (0.95, (0.02, 0.01), (10, 10.5), "hardly faster than bfloat16 here"),
    ],
)
def test_the_advice(agreement, divergences, speeds, words):
    before, after = (Evaluation(100, 5.0, divergence, 1.0, agreement, 5.0) for divergence in divergences)
    found = Quality(before, after, dict(zip(("bfloat16", "calibrated"), speeds))).advice
    assert words in found and ";" not in found


def test_methods():
    found = [str(read_method(name)) for name in METHODS]
    assert found == ["rtn", "gptq", "awq+rtn", "smoothquant+rtn", "awq+gptq", "smoothquant+gptq"]


def test_towers_are_left_out_with_a_warning(tmp_path, caplog):
    from tests.llm.models.towers.seeing import save_seeing

    save_seeing(tmp_path / "seeing", "qwen3_vl")
    quantize.quantize_checkpoint(
        tmp_path / "seeing", tmp_path / "out", "int8", method="rtn", report=False, progress=False
    )
    assert "only the text model of seeing is quantised" in caplog.text
    with LLMModel(tmp_path / "out", progress=False) as model:
        assert model._model.towers == []
        assert model.generate([5, 6, 7], max_new_tokens=2).generated_token_ids
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "visual" in name]
