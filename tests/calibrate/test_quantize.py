"""`quantize_checkpoint` and `pace quantize`: what is written is what is loaded, for every architecture, and better than
without a text."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pace.assets import TINY
from pace.calibrate import METHODS, job, quantize
from pace.calibrate.job import Job
from pace.calibrate.method import read_method
from pace.calibrate.report import Quality
from pace.calibrate.texts import choose_windows
from pace.cli import main
from pace.eval import Evaluation, read_texts
from pace.llm import LLMModel, QuantizationConfig, SamplingConfig
from pace.llm.models.model_utils import load_model as load_layers
from pace.ops import native
from pace.ops.weight_layout import WeightLayout
from pace.quant import Int8
from tests.llm.models.parts import representative
from tests.llm.models.variants import IDS, ROUTED, VARIANTS, save_tiny
from tests.support import prefill

pytest.importorskip("transformers")
quantize_checkpoint = functools.partial(quantize.quantize_checkpoint, progress=False, report=False)
HELDOUT = Path(__file__).parents[1] / "data" / "tiny_heldout.jsonl"


@functools.cache
def texts(first: int, count: int) -> tuple[str, ...]:
    """Of the held-out file; those that calibrate and those that judge are different ones."""
    return tuple(read_texts(HELDOUT)[first : first + count])


@pytest.fixture
def written(monkeypatch):
    """What went into the float model of each part that was written: module -> its weight as it was multiplied from then
    on."""
    found = {}

    def quantize_part(self, product, part, rows, inputs, original=Job.quantize_part):
        original(self, product, part, rows, inputs)
        found[part] = product.weight.matrix[rows].clone()

    monkeypatch.setattr(Job, "quantize_part", quantize_part)
    return found


EVERYWHERE = ("awq+gptq", "smoothquant")
"""The methods that calibrate every architecture."""

REFUSED = ("gpt_neox", "gpt2")
"""Families whose tensors hold queries, keys and values head by head, or columns."""


def parts_of(product) -> dict[str, slice]:
    """The parts of a product, and their rows."""
    ends = torch.tensor([0, *product.parts.values()]).cumsum(0).tolist()
    return {part: slice(first, last) for part, first, last in zip(product.parts, ends, ends[1:])}


def is_quantised(matrix) -> bool:
    """Routers and what makes keys and values of latents stay floats."""
    return not matrix.keeps_floats and not any(part.endswith("kv_b_proj") for part in matrix.parts)


def distance(found, exact, model_type) -> float:
    """Of all rows of logits, relative; of mixtures, the median's: a token that goes to another expert is far from where it
    was."""
    if model_type not in ROUTED:
        return ((found - exact).norm() / exact.norm()).item()
    return ((found - exact).norm(dim=1) / exact.norm(dim=1)).median().item()


def tokens(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(2, 99, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


# -- every architecture ------------------------------------------------------------------------------------------------


def cases() -> list[Any]:
    """Variants, each with a method: whatever has a part that none before has, by one method in every run and by the other
    in some; the others by one in some runs."""
    found = []
    for index, name in enumerate(IDS):
        first, second = EVERYWHERE if index % 2 == 0 else EVERYWHERE[::-1]
        marks = [(), pytest.mark.rotates] if name in representative() else [pytest.mark.rotates, pytest.mark.thorough]
        found += [pytest.param(name, method, marks=mark) for method, mark in zip((first, second), marks)]
    return found


@pytest.mark.parametrize(("name", "method"), cases())
def test_every_architecture(name, method, tmp_path, written, token_ids, few_strengths):
    """What is loaded has, bit for bit, the weights that calibration went on with, and the logits of a float model with
    these."""
    model_type, _, fields = VARIANTS[IDS.index(name)]
    save_tiny(tmp_path / "float", model_type, fields)
    code = "int4" if method == "awq+gptq" else "int8"
    config = QuantizationConfig(code, group=16) if code == "int4" else QuantizationConfig(code)
    if model_type in REFUSED:
        with pytest.raises(NotImplementedError, match="holds the rows of several matrices, or their columns"):
            quantize_checkpoint(tmp_path / "float", tmp_path / "out", config, tokens(12, 40), method=method)
        return
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "out", config, tokens(12, 40), method=method)
    assert report.num_tokens == 11 * 40 and report.bytes_after < report.bytes_before

    loaded = load_layers(tmp_path / "out", dtype="float32", backend="torch", progress=False)
    inside = [matrix for layer in loaded.layers for matrix in layer.matrices() if is_quantised(matrix)]
    assert {part for matrix in inside for part in matrix.parts} == written.keys()
    for matrix in inside:
        assert matrix.weight.layout.code == code
        for part, rows in parts_of(matrix).items():
            assert torch.equal(matrix.weight.matrix[rows], written[part])
    ids = torch.tensor(tokens(1, 30, seed=1)[0])
    logits = prefill(loaded, ids)
    floats = functools.partial(load_layers, tmp_path / "float", dtype="float32", backend="torch", progress=False)
    exact = prefill(floats(), ids)
    bound = 0.05 if code == "int8" else 0.5
    if model_type in ROUTED or len(loaded.layers) > 2:
        bound = max(bound, 2 * distance(prefill(floats(quantization=config), ids), exact, model_type))
    assert 0 < distance(logits, exact, model_type) < bound  # a scale that is forgotten moves them further

    native = LLMModel(tmp_path / "out", dtype="float32", progress=False)
    text = native.generate([tokens(1, 9)[0]], SamplingConfig(max_new_tokens=5, ignore_eos=True))
    assert len(text.generated_token_ids[0]) == 5


# -- the bundled model -------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_other_tools_read(tmp_path):
    quantize_checkpoint(TINY, tmp_path / "out", QuantizationConfig("int4", group=32), texts(300, 60), method="gptq")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    described = config.pop("quantization_config")
    assert config == json.loads((TINY / "config.json").read_text())
    assert described["quant_method"] == "compressed-tensors" and described["format"] == "mixed-precision"
    four, eight = described["config_groups"].values()
    assert four["targets"] == ["Linear"] and four["format"] == "pack-quantized" and four["weights"]["group_size"] == 32
    assert (
        eight["targets"] == ["model.embed_tokens", "lm_head"]
        and eight["input_activations"] is None
        and eight["format"] == "int-quantized"
        and eight["weights"]["strategy"] == "channel"
    )

    stored, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(TINY / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    assert (
        stored[f"{name}.weight_shape"].tolist() == [256, 256] and stored[f"{name}.weight_scale"].dtype == torch.bfloat16
    )
    words, scales = stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"].float()
    codes = torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], dim=-1).flatten(1) - 8
    values = codes * scales.repeat_interleave(32, dim=1)
    assert (values - original[f"{name}.weight"].float()).abs().max() < 4 * scales.abs().max()
    assert torch.corrcoef(torch.stack([values.flatten(), original[f"{name}.weight"].float().flatten()]))[0, 1] > 0.98
    embedding = stored["model.embed_tokens.weight"].float() * stored["model.embed_tokens.weight_scale"]
    assert (embedding - original["model.embed_tokens.weight"].float()).abs().max() < stored[
        "model.embed_tokens.weight_scale"
    ].max()
    assert torch.equal(stored["model.norm.weight"], original["model.norm.weight"])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in TINY.iterdir()}


@pytest.mark.parametrize(
    "config, tied, tolerance",
    [
        (QuantizationConfig("int4", group=32, embedding=None), True, 1e-5),
        (QuantizationConfig("int4", group=32), True, 1e-5),
        (QuantizationConfig("int8"), True, 0.1),
        (QuantizationConfig("int4", group=32, lm_head=None), False, 1e-5),
        (QuantizationConfig("int4", group=32), False, 0.05),
        (QuantizationConfig("int8"), False, 0.1),
    ],
    ids=[
        "tied, a float embedding",
        "tied, an int8 embedding",
        "tied, int8",
        "an int8 embedding beside int4",
        "and an int8 head",
        "int8",
    ],
)
def test_transformers_reads_it(config, tied, tolerance, tmp_path, token_ids):
    """As it does by default: its products with int8 round their inputs, to a scale a token, 0.5 to 1 % each; what it
    gives is exact without."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    save_tiny(tmp_path / "float", "llama", {**sizes, "tie_word_embeddings": tied})
    quantize_checkpoint(tmp_path / "float", tmp_path / "out", config, method="rtn")
    [ids] = tokens(1, 30)
    ours = prefill(load_layers(tmp_path / "out", dtype="float32", backend="torch", progress=False), torch.tensor(ids))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(torch.tensor([ids])).logits[0] - ours).norm() <= tolerance * ours.norm()


@pytest.mark.parametrize(
    "config",
    [
        QuantizationConfig("int4"),
        QuantizationConfig("int4", group=32, embedding="int4", overrides={"*.down_proj": None}),
        QuantizationConfig("int4", group=None),
        QuantizationConfig("int8"),
        QuantizationConfig("int8", group=32),
    ],
    ids=["int4", "int4 here and there", "int4 of rows", "int8", "int8 of groups"],
)
@pytest.mark.parametrize("small", [False, True], ids=["usual weights", "weights of 1e-7"])
def test_rtn_writes_what_quantising_at_load_does(config, small, tmp_path):
    """The same bits of every matrix, also where scales are too small for float16."""
    source = TINY
    if small:
        source = shutil.copytree(TINY, tmp_path / "small")
        state = load_file(TINY / "model.safetensors")
        save_file({name: 1e-7 * tensor for name, tensor in state.items()}, source / "model.safetensors")
    quantize_checkpoint(source, tmp_path / "out", config, method="rtn")
    at_load = load_layers(source, quantization=config, progress=False)
    from_file = load_layers(tmp_path / "out", progress=False)
    compared = 0
    for ours, theirs in zip(from_file.matrices(), at_load.matrices(), strict=True):
        assert ours.weight.layout == theirs.weight.layout
        assert torch.equal(native.unpack(ours.weight), native.unpack(theirs.weight)), ours.parts
        compared += isinstance(ours.weight.layout, WeightLayout)
    assert compared > 10
    ids = torch.tensor(tokens(1, 30)[0])
    assert torch.equal(prefill(from_file, ids), prefill(at_load, ids))


def test_the_same_arguments_give_the_same_file(tmp_path, token_ids):
    save_tiny(tmp_path / "float", "llama", {"hidden_size": 64, "intermediate_size": 128})
    for name in ("a", "b"):
        quantize_checkpoint(tmp_path / "float", tmp_path / name, "int4", tokens(12, 40))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_without_a_text_weights_are_rounded_to_the_nearest(tmp_path):
    report = quantize_checkpoint(
        TINY, tmp_path / "out", QuantizationConfig("int8", overrides={"*.down_proj": None}), method="rtn"
    )
    assert report.quality is None and report.num_tokens == 0 and report.method == "rtn"
    stored, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(TINY / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    rows = Int8().quantize(original[f"{name}.weight"])
    assert torch.equal(stored[f"{name}.weight"], rows.codes) and torch.equal(
        stored[f"{name}.weight_scale"], rows.scales
    )
    kept = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(stored[kept], original[kept])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"] == [
        *(f"model.layers.{i}.mlp.down_proj" for i in range(5))
    ]


def test_the_command(tmp_path, capsys):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(200, 64)), encoding="utf-8")
    out = str(tmp_path / "out")
    assert (
        main(
            [
                "quantize",
                str(TINY),
                out,
                "--calibrate",
                str(text),
                "--group",
                "32",
                "--method",
                "gptq",
                "--keep",
                "*.o_proj",
                "--json",
            ]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["out"] == out and report["method"] == "gptq" and report["bytes_after"] < 0.5 * report["bytes_before"]
    calibrated, uncalibrated = report["quality"]["calibrated"], report["quality"]["uncalibrated"]
    assert (
        0 < calibrated["kl_divergence"] < uncalibrated["kl_divergence"]
        and calibrated["num_tokens"] == uncalibrated["num_tokens"] > 100
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert (
        "model.layers.0.self_attn.o_proj.weight" in stored
        and stored["model.layers.0.mlp.up_proj.weight_scale"].shape[1] == 8
    )
    assert main(["quantize", str(TINY), str(tmp_path / "eight"), "--format", "int8", "--calibrate", str(text)]) == 0
    shown = capsys.readouterr().out
    assert "smoothquant" in shown and "quantised at load" in shown and "KL divergence" in shown
    assert main(["generate", "--model", out, "--chat", "What is the capital of Japan?"]) == 0
    assert "Tokyo" in capsys.readouterr().out


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"calibrate": None}, ValueError, "needs a text to calibrate on"),
        ({"calibrate": ["Once upon a time"]}, ValueError, "has 0 tokens; at least 256|has . tokens; at least 256"),
        ({"calibrate": [""]}, ValueError, "at least 256"),
        ({"quantization": "nf4"}, ValueError, "nf4 needs no calibration"),
        ({"quantization": "int5"}, ValueError, "no format 'int5'"),
        ({"quantization": None}, ValueError, "say what the checkpoint is to become"),
        ({"quantization": QuantizationConfig("int4", symmetric=False)}, ValueError, "zero points"),
        ({"quantization": QuantizationConfig("int4", lm_head="fp8")}, ValueError, "fp8 needs no calibration"),
        ({"quantization": QuantizationConfig("int4", overrides={"*.nothing": None})}, ValueError, "no module matches"),
        (
            {"quantization": QuantizationConfig("int4", embedding=None, overrides={"*": None})},
            ValueError,
            "nothing to quantise",
        ),
        ({"method": "magic"}, ValueError, "no method 'magic'; known are rtn"),
        ({"max_tokens": 10}, ValueError, "max_tokens must be at least 256"),
        ({"context": 5000}, ValueError, "context must be from 2 to the 1024"),
        (
            {"method": "awq", "act_order": False},
            ValueError,
            "the method awq rounds all at once; leave it out, or take one of gptq, awq.gptq, smoothquant.gptq",
        ),
        ({"quantization": "int8", "act_order": True}, ValueError, "the method smoothquant rounds all at once"),
        ({"method": "rtn", "calibrate": None, "act_order": False}, ValueError, "the method rtn rounds all at once"),
        (
            {"method": "rtn", "calibrate": None, "context": 64},
            ValueError,
            "^context would have no effect: there is no text to read",
        ),
        (
            {"method": "rtn", "calibrate": None, "max_tokens": 512, "tokenizer_name_or_path": TINY},
            ValueError,
            "^max_tokens and tokenizer_name_or_path would",
        ),
        ({"method": "rtn"}, ValueError, "the text would have no effect: .* the report is turned off"),
        ({"method": "rtn", "report": True, "max_tokens": 512}, ValueError, "max_tokens=512 would have no effect"),
        ({"out": "taken"}, FileExistsError, "taken exists already"),
    ],
    ids=str,
)
def test_what_is_refused(arguments, error, message, tmp_path):
    (tmp_path / "taken").mkdir()
    arguments = {"quantization": "int4", "calibrate": texts(0, 20), "out": "out", **arguments}
    out = tmp_path / arguments.pop("out")
    with pytest.raises(error, match=message):
        quantize_checkpoint(TINY, out, **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"], "nothing is left behind"


def test_quantised_checkpoints_are_refused(tmp_path):
    quantize_checkpoint(TINY, tmp_path / "once", "int8", method="rtn")
    with pytest.raises(ValueError, match="quantised already"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice", "int8", method="rtn")
    config = json.loads((tmp_path / "once" / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")  # its name in early checkpoints
    (tmp_path / "once" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantised already"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice", "int8", method="rtn")
    (tmp_path / "once" / "config.json").write_text(
        json.dumps(config | {"quantization_config": config["compression_config"]})
    )
    assert main(["eval", str(tmp_path / "once"), "--text", str(HELDOUT), "--against", "bf16"]) == 1


def test_gguf_files_are_refused_by_name(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="model.gguf is a GGUF file.*original"):
        quantize_checkpoint(tmp_path / "model.gguf", tmp_path / "out", "int8", method="rtn")


@pytest.mark.parametrize("length", [100, 300_000])
def test_of_a_huge_text_pieces_are_tokenised(length, monkeypatch):
    """Evenly spread, and more of them than are wanted; what is not much longer stays whole."""
    encoded = []
    monkeypatch.setattr("pace.calibrate.texts.encode", lambda rows, *arguments: encoded.extend(rows) or rows)
    model = load_layers(TINY, backend="torch", progress=False)
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
    assert (
        report.quality is None
        and "out is written and whole, but could not be compared with bfloat16: the weights take 14.2 GiB"
        in caplog.text
    )
    assert load_layers(tmp_path / "out", backend="torch", progress=False).num_weights


LAYER = 4 * (256 * 512 + 256 * 256 + 3 * 256 * 640 + 2 * 256)
MEMORY = {"gptq": LAYER + 44 * 640**2 + 4 * 512 * 256, "awq": LAYER + 4 * 512 * 256, "rtn": LAYER}
"""Of the bundled model, for 512 tokens of text: queries, keys and values, output, MLP and two norms; what GPTQ makes of
the MLP's 640 inputs; hidden states."""


@pytest.mark.parametrize("method", MEMORY)
def test_too_little_memory_is_refused_before_anything_is_read(method, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "available_memory_bytes", lambda: MEMORY[method] - 1)
    monkeypatch.setattr(Job, "run", lambda *arguments: pytest.fail("it began"))
    options = (
        {"calibrate": None} if method == "rtn" else {"calibrate": tokens(20, 256), "context": 256, "max_tokens": 512}
    )
    with pytest.raises(
        MemoryError, match=f"quantising takes {MEMORY[method] / 2**20:.1f} MiB of memory at least"
    ) as raised:
        quantize_checkpoint(TINY, tmp_path / "out", "int4", method=method, **options)
    message = str(raised.value)
    assert (
        "decoder layer in float32" in message and message.endswith("free some memory") and not list(tmp_path.iterdir())
    )
    assert ("512 tokens 512.0 KiB" in message and "fewer tokens (max_tokens)" in message) == (method != "rtn")
    assert ("without GPTQ (method='awq'" in message) == (method == "gptq")


@pytest.mark.parametrize(("more", "warned"), [(0, True), (1 << 30, False)])
def test_memory_that_may_not_be_enough_is_warned_of(more, warned, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(job, "available_memory_bytes", lambda: MEMORY["rtn"] + more)
    quantize_checkpoint(TINY, tmp_path / "out", "int4", method="rtn")
    assert ("should the system end the process" in caplog.text) == warned


def test_an_embedding_larger_than_a_layer_is_counted(tmp_path, token_ids, monkeypatch):
    save_tiny(tmp_path / "float", "llama", {"vocab_size": 9000, "hidden_size": 64, "tie_word_embeddings": True})
    monkeypatch.setattr(job, "available_memory_bytes", lambda: 9000 * 64 * 4)
    with pytest.raises(MemoryError, match="the embedding 2.2 MiB"):
        quantize_checkpoint(tmp_path / "float", tmp_path / "out", "int8", tokens(20, 40), method="smoothquant")


def test_a_disk_without_room_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    monkeypatch.setattr(Job, "run", lambda *arguments: pytest.fail("it began"))
    with pytest.raises(
        OSError, match="the file takes 2.4 MiB, and its disk has 1.0 MiB left; free some, or write to another"
    ):
        quantize_checkpoint(TINY, tmp_path / "out", "int4", method="rtn")
    assert not list(tmp_path.iterdir())


def test_what_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "quantize_part", fail)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(TINY, tmp_path / "out", "int8", texts(0, 20))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "option", [["--no-act-order"], ["--act-order"], ["--context", "64"], ["--tokens", "512"]], ids=str
)
def test_the_command_refuses_options_without_effect(option, tmp_path, capsys):
    assert main(["quantize", str(TINY), str(tmp_path / "out"), "--method", "rtn", *option]) == 1
    assert f"pace: error: {option[0]}" in capsys.readouterr().err


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
    assert [str(read_method(name)) for name in METHODS] == [
        "rtn",
        "gptq",
        "awq+rtn",
        "smoothquant+rtn",
        "awq+gptq",
        "smoothquant+gptq",
    ]
