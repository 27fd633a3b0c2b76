"""`pace bench` and `pace plan` on the bundled model: the numbers are consistent, and impossible measurements are
refused."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from datetime import date

import pytest
import torch

from pace import _C
from pace.assets import TINY
from pace.bench import limits, measure, plots, report
from pace.bench.prediction import efficiency, predict
from pace.bench.result import Repeat
from pace.bench.shapes import SHAPES
from pace.calibrate import quantize_checkpoint
from pace.cli import main
from pace.quant import QuantizationConfig
from tests.checkpoints.gguf.files import write_gguf

FAST = ["--prompt", "20", "--generate", "4", "--repeats", "2"]


pytestmark = pytest.mark.usefixtures("quick_limits")


@functools.cache
def loaded():
    return measure.load(str(TINY))


@pytest.fixture
def subject():
    return loaded()


@functools.cache
def measured():
    return measure.measure(loaded(), prompt=20, generated=4, repeats=1)


def test_numbers_fit_together(subject):
    result = measure.measure(subject, prompt=20, generated=4, batch=3, repeats=2)
    assert result.prefill_tokens_per_second == 20 / result.first_token_seconds > 0
    assert result.decode_tokens_per_second == 3 / result.step_seconds > 0
    assert result.context == 22
    for phase in (result.prefill, result.decode):
        kinds = phase.instructions
        assert 0 < sum(seconds for _, seconds, _ in kinds.values()) < phase.seconds
        assert kinds["attention"][0] == subject.model.config.num_hidden_layers
        weights = sum(num_bytes for kind, (*_, num_bytes) in kinds.items() if kind != "attention")
        assert weights == pytest.approx(subject.model.nbytes, rel=0.01)  # tied, and all but the norms
    assert result.decode.instructions["attention"][2] == 3 * 22 * result.costs.kv_bytes_per_token
    assert 0 < result.outside_share < 1
    subject.engine.check_idle()


def test_limits_are_the_mean_of_those_before_and_after_a_run(subject, monkeypatch):
    told = iter(range(1, 99))
    monkeypatch.setattr(limits, "measure", lambda seconds: limits.Limits("avx2", 2, float(n := next(told)), 10.0 * n))
    result = measure.measure(subject, prompt=4, generated=2, repeats=2)
    assert [(repeat.limits.read_gb_s, repeat.limits.fma_gflops) for repeat in result.repeats] == [
        (1.5, 15.0),
        (3.5, 35.0),
    ]


def test_ratios_are_of_each_run_and_its_limits(subject):
    measured = measure.measure(subject, prompt=20, generated=4, repeats=1)
    slow, fast = limits.Limits("avx2", 2, 1.0, 10.0), limits.Limits("avx2", 2, 2.0, 20.0)
    told = predict(measured.costs, efficiency("avx2", subject.model.dtype), slow, 20, 22)
    runs = [(slow, 1.0), (fast, 0.5), (fast, 0.25)]  # both at the expected speed, then one at twice the speed
    result = replace(
        measured,
        repeats=[Repeat(now, told.prefill_seconds * factor, told.step_seconds * factor) for now, factor in runs],
    )
    assert result.prefill_ratio == pytest.approx(1.0) and result.decode_ratio == pytest.approx(1.0)
    assert replace(result, repeats=result.repeats[2:]).decode_ratio == pytest.approx(2.0)
    assert result.as_dict()["predicted"]["decode_tokens_per_s"] == pytest.approx(
        2 / told.step_seconds
    )  # at the median of the limits


def test_what_does_not_fit_is_refused(subject, monkeypatch):
    with pytest.raises(ValueError, match=r"1020 \+ 64 tokens are more than this model has positions for: 1024"):
        measure.measure(subject, prompt=1020)
    with pytest.raises(ValueError, match=r"a context of 960 \+ 64 tokens are more"):
        measure.measure(subject, prompt=20, depth=960)
    with pytest.raises(ValueError, match=r"1024 \+ 4 tokens are more"):
        measure.measure(subject, prompt=1024, generated=4, depth=20)
    for mistake in (dict(batch=0), dict(depth=0), dict(prompt=-1)):
        with pytest.raises(ValueError, match="at least 1"):
            measure.measure(subject, **mistake)
    with pytest.raises(ValueError, match="at most 64 sequences"):
        measure.measure(subject, batch=65)
    monkeypatch.setattr(subject.engine.cache.pool, "num_blocks", 40)
    with pytest.raises(ValueError, match="need a cache of .* MiB, and .* MiB are available"):
        measure.measure(subject, prompt=20, depth=300, batch=2)


def test_decode_at_a_context_that_nobody_computed(subject, monkeypatch):
    steps = []
    forward = type(subject.engine.model).forward
    monkeypatch.setattr(
        type(subject.engine.model),
        "forward",
        lambda self, batch: steps.append((len(batch.tokens), batch.spans.kv_len.tolist())) or forward(self, batch),
    )
    result = measure.measure(subject, prompt=20, generated=4, batch=2, repeats=1, depth=700)
    assert result.context == 702 and result.decode_mbu > 0 and result.decode.instructions["attention"][1] > 0
    prefills, decodes = [s for s in steps if s[0] == 20], [s for s in steps if s[0] != 20]
    assert len(prefills) == 3  # warm-up, repeat, profile
    assert all(tokens == 2 and all(700 <= length <= 707 for length in lengths) for tokens, lengths in decodes)
    at_20 = measure.measure(subject, prompt=20, generated=4, batch=2, repeats=1)
    assert (
        result.costs.decode_bytes(2, result.context) - at_20.costs.decode_bytes(2, at_20.context)
        == 2 * 680 * subject.model.kv_spec.position_bytes
    )
    subject.engine.check_idle()


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_the_cache_is_filled_everywhere(kv_cache_dtype):
    """Each cache position that a decode step reads has numbers of an ordinary size, in all layers and heads."""
    subject = measure.load(str(TINY), kv_cache_dtype=kv_cache_dtype)
    engine = subject.engine
    sequences = measure._sequences(subject, 130 * 16 - 1100, 4, 2)
    for layer in engine.cache.kv:
        for tensor in layer.tensors:
            tensor[:140] = float("nan") if tensor.is_floating_point() else 0
    measure.fill_cache(engine, sequences)
    for sequence in sequences:
        assert sequence.num_computed == len(sequence.tokens) - 1
        table = torch.tensor(sequence.block_table)
        for layer in engine.cache.kv:
            keys, values = layer.k[table].float(), layer.v[table][..., : layer.value_dim].float()
            if kv_cache_dtype == "int8":
                keys, values = keys * layer.k_scales[table].unsqueeze(-2), values * layer.v_scales[table].unsqueeze(-1)
            for numbers in (keys, values):
                assert 0.9 < numbers.std() < 1.1 and numbers.abs().max() < 8
                assert numbers.flatten(2).std(-1).min() > 0.8  # in every head of every block
    engine.abort(sequences)
    engine.check_idle()


@pytest.mark.alone
def test_the_profile_accounts_for_a_decode_step(monkeypatch):
    """97 % of the whole step is spent in the program's instructions; the rest is Python, dispatch and sampling.

    The best of many runs of a few steps counts: on a busy machine, few steps in a row are not interrupted. The model
    reads 0.7 GB per step, less than models of 0.5B do."""
    shape = dict(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32000,
    )
    monkeypatch.setitem(SHAPES, "medium", SHAPES["llama-3.2-1b"] | shape)
    medium, best = measure.load("medium", "float32"), 1.0
    for _ in range(400):
        _, decode = measure._phases(medium, prompt=4, generated=4, batch=1, depth=None)
        best = min(best, decode.outside / decode.seconds)
        if best <= 0.03:
            break
    assert best <= 0.03, f"{best:.1%} of a step is outside of the instructions"


def test_the_command_prints_a_table_or_one_line_of_json(capsys):
    float32 = ["bench", str(TINY), *FAST, "--batch", "2", "--dtype", "float32"]
    assert main([*float32, "--profile"]) == 0
    out = capsys.readouterr().out
    assert "tiny, float32, native on" in out and "outside of the kernels" in out and "{" not in out
    assert re.search(r"measured is \d\.\d\d and \d\.\d\d of that", out)
    assert main([*float32, "--json"]) == 0
    out = capsys.readouterr().out
    numbers = json.loads(out)
    assert out.count("\n") == 1 and numbers["held_as"] == "float32"
    assert numbers["batch"] == 2 and numbers["dtype"] == "float32" and numbers["decode_tokens_per_s"] > 0
    assert numbers["context"] == 20
    with pytest.raises(SystemExit):
        main([*float32, "--json", "--profile"])
    assert "leave out --profile" in capsys.readouterr().err
    assert main(["bench", str(TINY), *FAST, "--context", "300"]) == 0
    out = capsys.readouterr().out
    assert "prefill of 20, decode of 1 x 4 at 300 tokens" in out and "decode at 300 " in out
    assert "a step at 302 tokens" in out
    assert main(["bench", str(TINY), *FAST, "--context", "300", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == 300


def test_a_cache_in_int8_is_measured_and_named(capsys):
    int8 = ["bench", str(TINY), *FAST, "--kv-cache-dtype", "int8", "--context", "300"]
    assert main([*int8, "--profile"]) == 0 and "tiny, bfloat16 (cache int8), native on" in capsys.readouterr().out
    assert main([*int8, "--json"]) == 0 and json.loads(capsys.readouterr().out)["kv_cache_dtype"] == "int8"
    assert main(["bench", str(TINY), *FAST, "--kv-cache-dtype", "int5"]) == 1
    assert "--kv-cache-dtype must be" in capsys.readouterr().err


def test_op_by_op_has_no_profile(capsys):
    eager = ["bench", str(TINY), *FAST, "--backend", "native-eager"]
    assert main([*eager, "--profile"]) == 0 and "no profile" in capsys.readouterr().out
    assert main([*eager, "--json"]) == 0 and json.loads(capsys.readouterr().out)["outside_kernels_share"] is None


def test_memory_is_told_in_the_order_of_time_and_shares_are_explained():
    """The two peaks are of different times, so neither bounds the other."""
    table = report.table(measured())
    numbers = r"resident: [\d,]+ MiB before, at most [\d,]+ while loading, [\d,]+ while running"
    assert re.search(numbers, table) and "\nMFU, MBU     shares of these limits" in table


@pytest.mark.parametrize("bandwidth, flops", [(1e-3, 1e9), (1e9, 1e-3), (1e9, 1e9)])
def test_shares_above_1_are_explained(bandwidth, flops):
    result = measured()
    [once] = result.repeats
    changed = replace(once.limits, read_gb_s=bandwidth, fma_gflops=flops)
    table = report.table(replace(result, repeats=[replace(once, limits=changed)]))
    assert ("MBU > 1" in table) == (bandwidth < 1) and ("MFU > 1" in table) == (flops < 1)


def test_the_picture_names_machine_and_day_and_lists_bars_from_the_top(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    report.plot(measured(), tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
    [figure] = figures
    roof, bars = figure.axes
    title = figure.get_suptitle()
    assert _C.cpu_info()["model_name"] in title and str(date.today()) in title and "bfloat16" in title
    assert not any("10^" in label.get_text() for axis in (roof.xaxis, roof.yaxis) for label in axis.get_ticklabels())
    names = [text.get_text() for text in bars.get_legend().get_texts()]
    assert names[0] == "outside" and names == [bar.get_label() for bar in bars.containers][::-1]


def test_the_roofline_has_its_ridge_and_bars_their_reason_to_be_missing():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    result = measured()
    figure, (roof, bars) = pyplot.subplots(1, 2)
    report._roofline(roof, result)
    x, y = roof.lines[0].get_data()
    assert result.limits.fma_gflops / result.limits.read_gb_s in x and max(y) == result.limits.fma_gflops
    report._bars(bars, replace(result, prefill=None, decode=None))
    assert "no profile" in bars.texts[0].get_text() and not bars.patches
    pyplot.close(figure)


def test_mistakes(capsys):
    assert main(["bench", "no-such-shape"]) == 1
    assert main(["bench", "--list"]) == 0 and "qwen2.5-0.5b" in capsys.readouterr().out
    for command in ("bench", "plan"):
        assert (
            main([command, "Llama3.2-1b"]) == 1 and "did you mean the shape 'llama-3.2-1b'" in capsys.readouterr().err
        )
    assert main(["plan", "llama-3.2-1b", "--revision", "v2"]) == 1 and "has no revisions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "options"),
    [("bench", ["prompt", "context", "generate", "batch", "repeats"]), ("plan", ["prompt", "context", "batch"])],
)
def test_counts_are_at_least_1(command, options, capsys, monkeypatch):
    monkeypatch.setattr(measure, "load", lambda *_: pytest.fail("loaded"))
    for option in options:
        for wrong in ("0", "-1", "1e3"):
            with pytest.raises(SystemExit, match="2"):
                main([command, str(TINY), f"--{option}={wrong}"])
            assert f"--{option}: must be a whole number, at least 1; got {wrong!r}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([command])


def test_pictures_that_cannot_be_written_are_refused_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(measure, "load", lambda *_: pytest.fail("loaded"))
    (tmp_path / "folder.png").mkdir()
    for name, message in [
        ("missing/a.png", "there is no directory"),
        ("a.doc", "type of picture"),
        ("folder.png", "is a directory"),
    ]:
        assert main(["bench", str(TINY), "--plot", str(tmp_path / name)]) == 1 and message in capsys.readouterr().err
    monkeypatch.setattr(plots.os, "access", lambda *_: False)
    assert main(["bench", str(TINY), "--plot", str(tmp_path / "a.png")]) == 1
    assert "may not write" in capsys.readouterr().err


def test_a_picture_that_fails_loses_no_figures(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise OSError("no space left on the device")

    monkeypatch.setattr(plots, "check_plot", lambda _: None)
    monkeypatch.setattr(report, "plot", fail)
    assert main(["bench", str(TINY), *FAST, "--json", "--plot", str(tmp_path / "a.png")]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["prompt"] == 20 and "no space left" in printed.err


def test_too_little_memory_is_told_in_the_words_of_the_loader(monkeypatch, capsys):
    def refuse(*_):
        raise MemoryError("the weights take 30 GiB")

    monkeypatch.setattr(measure, "load", refuse)
    assert main(["bench", str(TINY)]) == 1 and capsys.readouterr().err == "pace: error: the weights take 30 GiB\n"


def test_plan_reads_the_config_alone(tmp_path, capsys, quick_limits):
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    assert main(["plan", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [p["dtype"] for p in told["plans"]] == ["bfloat16", "float16", "float32", "int8", "int4"]
    assert all(p["max_context"] == 1024 and p["decode_tokens_per_second"] > 0 for p in told["plans"])
    assert main(["plan", "qwen2.5-0.5b", "--context", "20000", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert "bfloat16" in out and "prompt of 512 tokens, and 2 sequences at 20000" in out
    assert main(["plan", "qwen2.5-0.5b", "--context", "33000"]) == 1 and "32768" in capsys.readouterr().err
    assert main(["plan", "qwen2.5-0.5b", "--kv-cache-dtype", "int8"]) == 0
    assert "6.4 KiB" in capsys.readouterr().out  # 12.0 in bfloat16


def test_plan_of_formats_and_of_quantised_checkpoints(tmp_path, capsys, quick_limits):
    """The planned sizes equal the sizes of the loaded models."""
    assert main(["plan", str(TINY), "--quantization", '{"format": "int4", "group": 32}', "--json"]) == 0
    [told] = json.loads(capsys.readouterr().out)["plans"]
    assert told["dtype"] == "int4 (group=32)"
    assert told["weight_bytes"] == measure.load(str(TINY), quantization={"format": "int4", "group": 32}).model.nbytes

    quantize_checkpoint(
        TINY, tmp_path / "quantised", QuantizationConfig("int4", embedding=None), method="rtn", progress=False
    )
    write_gguf(TINY, tmp_path / "model.gguf", "Q4_0")
    named = lambda number: lambda writer: writer.add_file_type(number)
    write_gguf(TINY, tmp_path / "named.gguf", lambda name: "Q8_0" if "embed" in name else "Q4_0", named(15))
    write_gguf(TINY, tmp_path / "strange.gguf", "Q4_0", named(999))
    write_gguf(TINY, tmp_path / "floats.gguf", "F16", named(1))
    assert measure.load(str(tmp_path / "floats.gguf")).model.storage_name == "bfloat16"
    for path, kind, dtype in (
        (tmp_path / "named.gguf", "Q4_K_M", "int4"),
        (tmp_path / "strange.gguf", "int4, group 32", "int4"),
        (tmp_path / "quantised", "int4, group 64", "int4"),
        (tmp_path / "model.gguf", "int4, group 32", "int4"),
    ):
        loaded = measure.load(str(path))
        assert loaded.costs.code == dtype and loaded.model.storage_name == kind
        assert main(["plan", str(path), "--json"]) == 0
        [told] = json.loads(capsys.readouterr().out)["plans"]
        assert told["dtype"] == kind and told["weight_bytes"] == loaded.model.nbytes
        assert told["decode_tokens_per_second"] > 0
        assert main(["plan", str(path), "--no-sample"]) == 0 and f"\n{kind}  " in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "quantised"), "--quantization", "int8", "--no-sample"]) == 0, (
        "its embedding is of floats"
    )
    assert main(["plan", str(tmp_path / "model.gguf"), "--quantization", "int8"]) == 1
    assert "quantised already" in capsys.readouterr().err
    (tmp_path / "quantised" / "model.safetensors").unlink()
    assert main(["plan", str(tmp_path / "quantised")]) == 1 and "a plan needs its tensors" in capsys.readouterr().err


def test_a_quantised_model_is_measured_by_its_own_bytes():
    plain, small = measure.load(str(TINY)), measure.load(str(TINY), quantization="int4")
    assert 3 < plain.costs.decode_weight_bytes / small.costs.decode_weight_bytes < 4
    result = measure.measure(small, prompt=20, generated=4, repeats=1)
    assert result.as_dict()["quantization"]["format"] == "int4"
    assert " int4 (cache bfloat16), native" in report.table(result).splitlines()[0]
