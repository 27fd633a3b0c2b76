"""benchmarks/kernels.py measures every requested kernel at the shape's sizes, and counts the bytes and operations of
the definition."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import kernels
from pace.bench.shapes import SHAPES
from pace.ops import native
from pace.ops.weight_layout import GRIDS

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 64, 96, 4, 2, 32, 500
SMALL = SHAPES["llama-3.2-1b"] | dict(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    vocab_size=VOCAB,
    num_hidden_layers=1,
)


@pytest.fixture(autouse=True)
def small(quick_limits, monkeypatch):
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr(kernels, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "DECODE_CONTEXTS", (40, 130))
    monkeypatch.setattr(kernels, "PREFILL_TOKENS", (33,))


class Recorder:
    """A clock that runs each step twice and records its arguments."""

    def __init__(self):
        self.told: dict[str, tuple[int, int]] = {}

    def measure(self, kernel, step, num_bytes=0, operations=0):
        step(), step()
        self.told[kernel.removeprefix("small ")] = num_bytes, operations


def record(
    kernel: str,
    rows: tuple[int, ...] = (1, 8),
    kv_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    dtypes: tuple[str, ...] = ("bfloat16",),
) -> dict[str, tuple[int, int]]:
    recorder = Recorder()
    list(kernels.measure(kernel, "small", list(dtypes), list(kv_dtypes), rows, recorder))
    return recorder.told


def test_linear():
    told = record("linear", (1, 64))
    weights = {"qkv": (256, 64), "output": (64, 128), "gate, up": (192, 64), "down": (64, 96), "head": (500, 64)}
    assert set(told) == {
        f"{name} {n} x {k}, {m} rows" for name, (n, k) in weights.items() for m in (1, 64) if (name, m) != ("head", 64)
    }
    for name, (n, k) in weights.items():
        num_bytes, operations = told[f"{name} {n} x {k}, 1 rows"]
        assert operations == 2 * n * k and num_bytes >= 2 * n * k == pytest.approx(
            num_bytes, rel=0.05
        )  # a header, rows up to a multiple of 16
    assert told["down 64 x 96, 64 rows"][1] == 64 * told["down 64 x 96, 1 rows"][1]


def test_linear_over_several_dtypes():
    told = record("linear", (1, 64), dtypes=("bfloat16", "int8", "int4:32"))
    down = [name for name in told if name.startswith("down")]
    assert down == [f"down 64 x 96, {m} rows, {dtype}" for m in (1, 64) for dtype in ("bfloat16", "int8", "int4:32")]
    assert [told[name][1] for name in down[:3]] == [2 * 64 * 96] * 3, (
        "a multiply-add is two operations, of whatever numbers"
    )
    floats, eight, four = (told[f"head 500 x 64, 1 rows, {dtype}"][0] for dtype in ("bfloat16", "int8", "int4:32"))
    assert 1.8 < floats / eight < 2 and 3.2 < floats / four < 3.56, "16, 8.5 and 4.5 bits, and the header"


@pytest.mark.parametrize("name", kernels.STORED)
def test_every_row_of_a_cold_weight_is_written(name):
    k = 256 if name in GRIDS else 64
    weights = kernels._cold_weights(600, k, kernels.STORED[name], glu=False)
    assert len(weights) * weights[0].nbytes >= kernels.COLD_BYTES
    for weight in weights[:: len(weights) - 1]:
        y = native.linear(torch.eye(k), weight)  # its columns are the rows of the weight
        sums = y.abs().sum(0)
        assert y.shape == (k, 600) and (sums > 0).sum() > 550  # random scales may be 0
        assert name in GRIDS or sums.min() > 0.1 and 0.005 < y.abs().mean() < 0.05, "of a trained scale"
        assert torch.equal(y[:, :256], y[:, 256:512])


def test_attention():
    assert record("decode") == {f"decode at {n}": (n * 2 * KV_HEADS * DIM * 2, n * 4 * HEADS * DIM) for n in (40, 130)}
    assert record("prefill") == {"prefill of 33": (0, 4 * HEADS * DIM * sum(range(1, 34)))}


def test_attention_over_several_dtypes():
    both = record("decode", kv_dtypes=(torch.bfloat16, torch.int8))
    assert list(both) == [
        "decode at 40, bfloat16",
        "decode at 40, int8",
        "decode at 130, bfloat16",
        "decode at 130, int8",
    ]
    assert both["decode at 130, int8"] == (130 * 2 * KV_HEADS * (DIM + 4), 130 * 4 * HEADS * DIM)
    assert list(record("prefill", kv_dtypes=(torch.int8, torch.float32))) == [
        "prefill of 33, int8",
        "prefill of 33, float32",
    ]


def test_rows_and_sampling():
    told = record("norms")
    assert {name: num_bytes for name, (num_bytes, _) in told.items()} == {
        f"{norm}, {m} rows": 2 * 4 * m * (HEADS * DIM if norm.startswith("head") else HIDDEN)
        for norm in ("rms_norm", "layer_norm", "head_rms_norm")
        for m in (1, 8)
    }
    assert record("rope") == {f"rotary, {m} rows": (2 * 4 * m * HEADS * DIM + 4 * m * DIM, 0) for m in (1, 8)}
    assert record("sampling") == {f"argmax over {VOCAB}": (2000, 0)}


@pytest.mark.parametrize("suffix", [".md", ".json"])
def test_the_script_measures_what_was_asked_for(suffix, tmp_path, monkeypatch, capsys):
    path = tmp_path / f"out{suffix}"
    monkeypatch.setattr(kernels.Clock, "__init__", lambda self, repeats: object.__setattr__(self, "repeats", 1))
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "kernels.py",
            "--only",
            "attention",
            "rope",
            "decode",
            "--shape",
            "small",
            "--rows",
            "1",
            "4",
            "--output",
            str(path),
        ],
    )
    kernels.main()
    numbers = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["kernel"] for row in numbers["rows"]] == [
        "small decode at 40",
        "small decode at 130",
        "small prefill of 33",
        "small rotary, 1 rows",
        "small rotary, 4 rows",
    ]
    decode, prefill = numbers["rows"][0], numbers["rows"][2]
    assert (
        decode["gb_s"] == pytest.approx(40 * 256 / decode["seconds"] / 1e9)
        and decode["mfu"] > 0
        and prefill["mbu"] is None
    )
    assert numbers["kv_dtypes"] == numbers["dtypes"] == ["bfloat16"]
    if suffix == ".json":
        assert json.loads(path.read_text()) == numbers
    else:
        assert (
            path.read_text().splitlines()[2] == "| kernel | us | GB/s | MBU | GFLOPS | MFU |"
            and len(path.read_text().splitlines()) == 4 + 5
        )


def test_all_is_measured_unless_told(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "measure", lambda kernel, *_: iter([kernels.Row(kernel, 1.0, None, None, None, None)]))
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--shape", "small"])
    kernels.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["kernel"] for row in rows] == ["linear", "decode", "prefill", "norms", "rope", "sampling"]
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--output", "x.txt"])
    with pytest.raises(SystemExit):
        kernels.main()
    assert kernels.ROWS == (1, 2, 4, 8, 16, 32, 128, 512)


def test_a_long_kernel_is_measured_less_often(monkeypatch):
    monkeypatch.setattr(kernels, "LONG_SECONDS", 0.0)
    calls = []
    kernels.Clock(9).measure("slow", lambda: calls.append(kernels.time.sleep(0.04)))
    assert len(calls) == 1 + kernels.FEW_REPEATS
