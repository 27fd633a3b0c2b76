"""Quantised models: their weights are those of the format, and the promises about equal bits hold.
tests/llm/models/visit.py checks every architecture."""

from __future__ import annotations

import functools
import json
import logging
import math

import pytest
import torch
from safetensors.torch import load_file

from pace.assets import TINY, TINY_DRAFT
from pace.cli import main
from pace.llm import DraftModelConfig, LLMModel, PromptLookupConfig, QuantizationConfig, SamplingConfig
from pace.llm.layers import Embedding, TiedLMHead
from pace.llm.models.model_list import read_config
from pace.ops import native, reference
from pace.ops.weight_layout import QuantizedRows, WeightLayout, layout_of_rows
from pace.quant import FORMATS, Int4, Int8, read_format
from tests.llm.generators import check_idle
from tests.plugins.tiers import sample
from tests.support import TensorDict, prefill

GREEDY = SamplingConfig(max_new_tokens=20, ignore_eos=True)
FORMATS_AND_MORE = [*FORMATS, {"format": "int4", "symmetric": False}, {"format": "int8", "group": 32}]


def make(config_json: dict, ops=reference, dtype=torch.float32, quantization=None):
    """Returns a model without weights."""
    model_class, config = read_config(config_json)
    model = model_class(config, dtype, ops)
    model.quantize(quantization)
    return model


def read(num_layers: int = 5) -> tuple[dict, dict[str, torch.Tensor]]:
    """Returns the config and the tensors of the bundled model's first layers."""
    config_json = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    state = load_file(TINY / "model.safetensors")
    absent = tuple(f"model.layers.{layer}." for layer in range(num_layers, 5))
    return config_json, {name: tensor for name, tensor in state.items() if not name.startswith(absent)}


def read_small(num_layers: int) -> tuple[dict, dict[str, torch.Tensor]]:
    """Returns the same with the first 256 tokens and half of each MLP: 320 columns, not a multiple of a super-block."""
    config_json, state = read(num_layers)
    for name, tensor in state.items():
        if name.endswith("embed_tokens.weight"):
            state[name] = tensor[:256].clone()
        elif ".mlp." in name:
            state[name] = tensor[:, :320].clone() if "down" in name else tensor[:320].clone()
    return config_json | {"vocab_size": 256, "intermediate_size": 320}, state


def config_of(quantization: str | dict) -> QuantizationConfig:
    return QuantizationConfig(**(quantization if isinstance(quantization, dict) else {"format": quantization}))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def dequantized(config_json: dict, state: dict[str, torch.Tensor], config: QuantizationConfig):
    """Returns the checkpoint with each stored matrix quantised in its format and dequantised."""
    model = make(config_json)
    kinds = {
        part: "embedding" if isinstance(matrix, Embedding) else "lm_head" if part == "lm_head" else "format"
        for matrix in model.matrices()
        for part in matrix.parts
    }
    formats = config.for_modules(kinds, isinstance(model.lm_head, TiedLMHead))
    return {
        name: format.for_width(tensor.shape[1]).quantize(tensor).dequantize()
        if (format := formats.get(name.removesuffix(".weight")))
        else tensor
        for name, tensor in state.items()
    }


def load(config_json: dict, state: dict[str, torch.Tensor], **options):
    return fill(make(config_json, **options), state)


def fill(model, state: dict[str, torch.Tensor]):
    model.load_weights(TensorDict(state), workers=2)
    model.kv_dtype = torch.float32
    return model


@functools.cache
def tiny(quantization: str | None = "int4", **options) -> LLMModel:
    return LLMModel(TINY, quantization=quantization, progress=False, **options)


def prompts(*lengths: int, vocab_size: int = 1000) -> list[list[int]]:
    seeded = [(length, torch.Generator().manual_seed(length)) for length in lengths]
    return [torch.randint(10, vocab_size, (length,), generator=chance).tolist() for length, chance in seeded]


IDS = torch.tensor(prompts(50, vocab_size=256)[0])
"""A text for `read_small`."""


# -- weights
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quantization", sample(FORMATS_AND_MORE, lambda format: format not in ("q2_k", "q5_k", "q6_k")), ids=str
)
def test_logits_are_those_of_the_dequantised_weights(quantization) -> None:
    """On torch the bits equal those of a float32 model with these weights. On the kernels quantised inputs add an
    error.

    An integer product rounds its input to max / 127 of a group. The relative error is peak / (127 sqrt 12), with peaks
    of 2 to 4 times the mean. The errors of successive products add up like independent ones. float8 does not round its
    inputs."""
    config, (config_json, state) = config_of(quantization), read_small(1)
    expected = prefill(load(config_json, dequantized(config_json, state, config)), IDS)
    found = prefill(load(config_json, state, dtype=torch.bfloat16, quantization=config), IDS)
    assert torch.equal(found, expected)
    assert not torch.equal(found, prefill(load(config_json, state), IDS))

    found = prefill(load(config_json, state, ops=native, quantization=config), IDS)
    products = 4 * config_json["num_hidden_layers"] + 1
    bound = 4 / (127 * math.sqrt(12)) * math.sqrt(products) if config.format.layout.code != "float8" else 1e-5
    assert relative_error(found, expected) <= bound


@pytest.mark.parametrize("seed", sample(range(8), lambda seed: seed < 3))
def test_random_models_in_random_formats(seed) -> None:
    """Checks one model of each architecture. The sweep of quantization_sweep.py runs more cases."""
    pytest.importorskip("transformers")
    from tests.llm import quantization_sweep

    assert quantization_sweep.check_case(seed) is None


def layouts(model) -> dict[str, WeightLayout | torch.dtype]:
    """Returns the layout or dtype in which the rows of each module's weight are stored, by module name."""
    found = {}
    for matrix in model.matrices():
        row = 0
        for part, rows in matrix.parts.items():
            found[part] = layout_of_rows(matrix.weight.layout, row, rows)
            row += rows
    return found


def test_what_is_said_of_modules_is_done() -> None:
    config_json, state = read_small(4)
    overrides = {"*.down_proj": "int8", "model.layers.1.*": None, "*.3.*.v_proj": {"format": "int4", "group": 16}}
    config = QuantizationConfig("int4", group=32, embedding="int4", overrides=overrides)
    model = load(config_json, state, dtype=torch.bfloat16, quantization=config)
    found = layouts(model)
    assert found["model.layers.0.self_attn.q_proj"] == found["model.layers.0.mlp.up_proj"] == WeightLayout("int4", 32)
    assert found["model.layers.0.mlp.down_proj"] == WeightLayout("int8", None)
    assert found["model.embed_tokens"] == WeightLayout("int4", 64)
    assert {found[name] for name in found if ".layers.1." in name} == {torch.bfloat16}
    assert found["model.layers.3.self_attn.q_proj"] == WeightLayout("int4", 32)
    assert found["model.layers.3.self_attn.v_proj"] == WeightLayout("int4", 16), "parts of one matrix"
    expected = load(config_json, dequantized(config_json, state, config))
    assert torch.equal(prefill(model, IDS), prefill(expected, IDS))


@pytest.mark.parametrize("ops", [reference, native], ids=["reference", "native"])
def test_parts_of_a_matrix_keep_their_formats(ops, caplog) -> None:
    config_json, state = read_small(3)
    overrides = {"*.k_proj": "fp8", "*.0.*.up_proj": None, "*.1.*.v_proj": "q6_k", "*.2.*.gate_proj": "q4_k"}
    config = QuantizationConfig("int4", overrides=overrides)
    with caplog.at_level(logging.WARNING, logger="pace"):
        model = load(config_json, state, ops=ops, quantization=config)
    assert not caplog.records
    found = layouts(model)
    assert found["model.layers.2.self_attn.q_proj"] == found["model.layers.0.mlp.gate_proj"] == WeightLayout("int4", 64)
    assert found["model.layers.2.self_attn.k_proj"] == WeightLayout("float8", 128)
    assert found["model.layers.0.mlp.up_proj"] == torch.float32
    assert str(found["model.layers.1.self_attn.v_proj"]) == "int6, group 16, super-blocks"
    assert str(found["model.layers.2.mlp.gate_proj"]) == "int4, group 32, super-blocks, minima"
    expected = prefill(load(config_json, dequantized(config_json, state, config)), IDS)
    if ops is native:
        assert relative_error(prefill(model, IDS), expected) < 0.05
    else:
        assert torch.equal(prefill(model, IDS), expected)


class QuantizedReader(TensorDict):
    """A checkpoint with some quantised matrices, in the form that readers of such checkpoints give."""

    def __init__(self, state: dict[str, torch.Tensor | QuantizedRows]):
        self.state = state
        self.tensors = {
            name: (source.layout if isinstance(source, QuantizedRows) else source.dtype, tuple(source.shape))
            for name, source in state.items()
        }

    def column_order(self, name: str) -> torch.Tensor | None:
        return self.state[name].order

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor | QuantizedRows:
        rows = self.state[name]
        if isinstance(rows, torch.Tensor):
            return rows[start:stop]
        return rows.take(slice(start, stop))


def quantized_checkpoint() -> tuple[dict, dict[str, torch.Tensor | QuantizedRows]]:
    """Returns the bundled model with a format for each kind of projection, an untied head, and the rest in floats."""
    config_json, state = read()
    state["lm_head.weight"] = state["model.embed_tokens.weight"] * 1.5
    formats = {"q_proj": "int4", "v_proj": "int8", "o_proj": "nf4", "gate_proj": "mxfp4", "up_proj": "mxfp4"}
    formats = {
        name: read_format(format) for name, format in (formats | {"down_proj": "fp8", "lm_head": "int8"}).items()
    }
    formats["k_proj"] = read_format("int4", symmetric=False, group=32)
    for name, tensor in state.items():
        if format := formats.get(name.split(".")[-2]):
            state[name] = format.quantize(tensor)
    return config_json | {"tie_word_embeddings": False}, state


def permuted(rows: QuantizedRows, order: torch.Tensor) -> QuantizedRows:
    return QuantizedRows(rows.layout, rows.codes, rows.scales, rows.mins, order)


def test_what_comes_quantised_stays_as_it_is() -> None:
    config_json, state = quantized_checkpoint()
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    for name in ("q_proj", "k_proj", "v_proj"):  # one order for all three in layer 1, different orders in layer 2
        first, second = f"model.layers.1.self_attn.{name}.weight", f"model.layers.2.self_attn.{name}.weight"
        state[first] = permuted(state[first], order)
        state[second] = permuted(state[second], order.roll(ord(name[0])))
    model = make(config_json, dtype=torch.bfloat16)
    model.load_weights(QuantizedReader(state), workers=2)
    model.kv_dtype = torch.float32
    found = layouts(model)
    assert found["model.layers.0.self_attn.q_proj"] == WeightLayout("int4", 64)
    assert found["model.layers.1.self_attn.k_proj"] == WeightLayout("int4", 32, has_mins=True)
    assert found["model.layers.1.self_attn.v_proj"] == WeightLayout("int8", None)
    assert found["model.layers.2.self_attn.q_proj"] == found["model.embed_tokens"] == torch.bfloat16
    assert found["model.layers.3.mlp.gate_proj"] == WeightLayout("int4", 32, codebook="mxfp4")
    assert found["lm_head"] == WeightLayout("int8", None)
    values = {name: rows.dequantize() if isinstance(rows, QuantizedRows) else rows for name, rows in state.items()}
    for name in values:
        if name.startswith("model.layers.2.self_attn") and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            values[name] = values[name].bfloat16()
    ids = torch.tensor(prompts(30)[0])
    assert torch.equal(prefill(model, ids), prefill(load(config_json, values), ids))


def test_what_is_quantised_already_is_not_quantised_again(caplog) -> None:
    """The config applies to tensors that are still floats. If there are none, it is an error."""
    config_json, state = quantized_checkpoint()
    model = make(config_json, quantization=QuantizationConfig("int4"))
    with caplog.at_level(logging.WARNING, logger="pace"):
        model.load_weights(QuantizedReader(state))
    assert "36 tensors of this checkpoint are quantised already and stay as they are" in caplog.text
    found = layouts(model)
    assert found["model.embed_tokens"] == Int8().layout and found["model.layers.0.self_attn.o_proj"].codebook == "nf4"
    state["model.embed_tokens.weight"] = Int8().quantize(state["model.embed_tokens.weight"])
    model = make(config_json, quantization=QuantizationConfig("int4"))
    told = r"quantised already \(model.*, and 36 more tensors\).*load it without quantization, or"
    with pytest.raises(ValueError, match=told):
        model.load_weights(QuantizedReader(state))
    assert model.nbytes == 0


@pytest.mark.parametrize("changed", [False, True])
def test_a_quantised_head_and_embedding_that_are_equal_are_one(changed) -> None:
    config_json, state = read_small(1)
    assert config_json["tie_word_embeddings"]
    state["model.embed_tokens.weight"] = Int8(group=32).quantize(state["model.embed_tokens.weight"])
    head = Int8(group=32).quantize(state["model.embed_tokens.weight"].dequantize())
    head.scales[-1, -1] *= 2 if changed else 1
    model = make(config_json)
    model.load_weights(QuantizedReader(state | {"lm_head.weight": head}))
    assert isinstance(model.lm_head, TiedLMHead) != changed


def test_weights_that_cannot_be_quantised_are_named() -> None:
    config_json, state = read_small(4)
    state["model.layers.3.mlp.up_proj.weight"][7, 5] = torch.nan
    with pytest.raises(ValueError, match="model.layers.3.mlp.up_proj.weight holds nan"):
        load(config_json, state, quantization=QuantizationConfig("int4"))


# -- bits
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["int8", "int4", "nf4", "fp8", "q4_k", "q6_k"])
def test_a_sequence_has_the_same_tokens_and_logits_in_every_company(quantization) -> None:
    model, rows = tiny(quantization), prompts(40, 3, 70, 17, 200)
    alone = [model.generate(row, GREEDY).generated_token_ids[0] for row in rows]
    assert model.generate(rows, GREEDY).generated_token_ids == alone
    assert model.generate(rows[::-1], GREEDY).generated_token_ids == alone[::-1]
    together = model.score(rows)
    assert all(torch.equal(model.score(row)[0], scores) for row, scores in zip(rows, together))
    with model.session() as session:  # token by token, and in chunks of 3
        logits = [session.append([token]) for token in rows[2]]
        session.truncate(0)
        assert torch.equal(torch.cat(logits), session.append(rows[2], logits="all"))
        session.truncate(0)
        chunks = [session.append(rows[2][start : start + 3], logits="all") for start in range(0, len(rows[2]), 3)]
        assert torch.equal(torch.cat(logits), torch.cat(chunks))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_programs_eager_kernels_and_threads_have_the_same_bits(quantization) -> None:
    rows = prompts(30, 50)
    expected = tiny(quantization).score(rows)
    for options in ({"backend": "native-eager"}, {"num_threads": 1}, {"num_threads": 3}):
        with LLMModel(TINY, quantization=quantization, progress=False, **options) as other:
            assert all(map(torch.equal, other.score(rows), expected)), options


@pytest.mark.parametrize("quantization", ["int8", "int4", "nf4", "mxfp8"])
def test_any_operator_runs_on_torch(quantization) -> None:
    """Torch uses the kernels' weights unpacked, so nf4 levels are rounded to integers."""
    rows, backend = prompts(30), "embedding=torch,projection=torch,mlp=torch,lm_head=torch"
    with LLMModel(TINY, quantization=quantization, progress=False, backend=backend) as mixed:
        scores = mixed.score(rows)[0]
        report = mixed.operator_report()
        assert report["mlp"].implementation == "torch" and report["attention"].implementation == "native"
    with LLMModel(TINY, quantization=quantization, progress=False, backend="torch") as reference:
        assert (scores - reference.score(rows)[0]).abs().max() < (0.3 if quantization == "nf4" else 0.05)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_drafts_change_no_token(quantization) -> None:
    rows = prompts(40, 17)
    for config in (PromptLookupConfig(), DraftModelConfig(TINY_DRAFT)):
        with LLMModel(TINY, quantization=quantization, spec_config=config, progress=False) as drafting:
            out = drafting.generate(rows, GREEDY)
            check_idle(drafting)
            report = drafting.memory_report()
        assert out.generated_token_ids == tiny(quantization).generate(rows, GREEDY).generated_token_ids
    assert out.metrics.num_drafted_tokens > 0
    assert report.compression("draft GatedMLP") > (1.8 if quantization == "int8" else 3)


def test_a_draft_model_has_the_format_without_what_is_said_of_modules() -> None:
    config, drafts = QuantizationConfig("int4", overrides={"model.layers.4.*": None}), DraftModelConfig(TINY_DRAFT)
    with LLMModel(TINY, quantization=config, spec_config=drafts, progress=False) as model:
        draft = model._engine.drafter.source.model.model
        assert draft.quantization == QuantizationConfig("int4")
        assert {matrix.weight.layout for matrix in draft.matrices()} == {Int8().layout, Int4().layout}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_int8_cache_prefixes_and_beams(quantization) -> None:
    (row,) = prompts(90)
    beams = SamplingConfig(num_beams=3, max_new_tokens=12, num_return_sequences=2)
    options = {"quantization": quantization, "kv_cache_dtype": "int8", "progress": False}
    with LLMModel(TINY, **options) as model, LLMModel(TINY, prefix_cache_bytes=0, **options) as without:
        first, second = (model.generate(row + [7, 8], GREEDY) for _ in range(2))
        fresh = without.generate(row + [7, 8], GREEDY)
        assert second.metrics.num_reused_tokens >= 80 and fresh.metrics.num_reused_tokens == 0
        assert first.generated_token_ids == second.generated_token_ids == fresh.generated_token_ids
        several = model.generate([row, row[:20]], beams)
        assert [*several.generated_token_ids[2:]] == without.generate(row[:20], beams).generated_token_ids
        check_idle(model)


# -- memory
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", FORMATS_AND_MORE, ids=str)
def test_memory_is_what_was_planned(quantization) -> None:
    config, (config_json, state) = config_of(quantization), read(1)
    model = make(config_json, native, torch.bfloat16, config)
    planned = model.planned_nbytes(native, torch.bfloat16)
    model.load_weights(TensorDict(state))
    assert model.nbytes == planned
    formats = config.for_modules({"e": "embedding", "m": "format"}, isinstance(model.lm_head, TiedLMHead))
    ideal = 0.0
    for matrix in model.matrices():
        format = formats["e" if isinstance(matrix, Embedding) else "m"].for_width(matrix.k)
        ideal += matrix.n * matrix.k * format.bits_per_weight(matrix.k) / 8
    vectors = 4 * (model.num_weights - sum(matrix.n * matrix.k for matrix in model.matrices()))
    assert ideal <= planned - vectors <= 1.03 * ideal, "headers, and rows padded to panels"


def test_what_does_not_fit_is_refused_by_its_quantised_size(monkeypatch) -> None:
    config_json, state = read()
    size = make(config_json, native, torch.bfloat16, QuantizationConfig("int4")).planned_nbytes(native, torch.bfloat16)
    monkeypatch.setattr("pace.llm.loading.memory.available_memory_bytes", lambda: size)
    make(config_json, native, torch.bfloat16, QuantizationConfig("int4")).load_weights(TensorDict(state))
    with pytest.raises(MemoryError, match="as bfloat16.*quantization='int4', which takes a quarter"):
        make(config_json, native, torch.bfloat16).load_weights(TensorDict(state))
    monkeypatch.setattr("pace.llm.loading.memory.available_memory_bytes", lambda: size - 1)
    with pytest.raises(MemoryError, match="in quantised form"):
        make(config_json, native, torch.bfloat16, QuantizationConfig("int4")).load_weights(TensorDict(state))


def test_the_report_tells_bytes_by_part_and_how_many_times_smaller_they_are() -> None:
    report = tiny("int4").memory_report()
    assert report.compression("GatedMLP") == pytest.approx(16 / 4.25, rel=0.02)
    assert report.compression("Embedding", 32) == pytest.approx(4, rel=0.02)
    assert report.compression() == pytest.approx(sum(report.weight_counts.values()) * 2 / sum(report.weights.values()))
    plain = tiny(None).memory_report()
    assert plain.weight_counts == report.weight_counts and plain.compression("Attention") == pytest.approx(1, rel=0.01)
    lines = {line.split("  ")[0]: line.split() for line in str(report).splitlines()}
    assert lines["weights: GatedMLP"][-1] == f"{report.compression('GatedMLP'):.2f}"
    assert lines["all weights"][-2] == f"{report.compression(bits=32):.2f}"


# -- user input
# ----------------------------------------------------------------------------------------------------------


def test_synonyms_and_mistakes() -> None:
    with LLMModel(TINY, load_in_4bit=True, progress=False) as model:
        assert model._model.quantization == QuantizationConfig("nf4")
    for arguments, told in (
        ({"quantization": "int5"}, "int8"),
        ({"quantization": "int4", "load_in_8bit": True}, "both"),
        ({"quantization": {"overrides": {"*.qproj": None}}}, "'*.q_proj'"),
    ):
        with pytest.raises(ValueError, match=told.replace("*", r"\*")):
            LLMModel(TINY, progress=False, **arguments)


def test_the_command_line(capsys) -> None:
    arguments = ["generate", "Once upon a time", "--max-new-tokens", "8", "--json"]
    for quantization in ("int8", '{"format": "int4", "group": 32, "lm_head": null}'):
        assert main([*arguments, "--quantization", quantization]) == 0
        found = json.loads(capsys.readouterr().out)["generated_token_ids"]
        given = json.loads(quantization) if quantization.startswith("{") else quantization
        with LLMModel(TINY, quantization=given, progress=False) as model:
            out = model.generate("Once upon a time", SamplingConfig(max_new_tokens=8))
        assert found == out.generated_token_ids
    with pytest.raises(SystemExit):
        main([*arguments, "--quantization", "int3"])
    assert "did you mean 'int8'" in capsys.readouterr().err
