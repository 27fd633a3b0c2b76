"""benchmarks/predictions.py: the shares it measures are those that predictions are made with, and its tables land where
they should."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import astuple, replace

import pytest
import torch

from benchmarks import predictions
from benchmarks.page import markers
from pace.assets import TINY
from pace.bench import limits, measure
from pace.bench.limits import Limits
from pace.bench.prediction import Efficiency, efficiency, predict
from pace.bench.result import Phase, Repeat


@pytest.fixture
def quick_limits(monkeypatch):
    monkeypatch.setattr(limits, "BUFFER_BYTES", 4 << 20)
    slow = limits.measure
    monkeypatch.setattr(limits, "measure", lambda seconds=0.01: slow(0.01))


TRUTH = Efficiency(weights=0.8, products=0.7, cache=0.02, decode_attention=0.5, prefill_attention=0.3)
"""With a cache so slow that it is what decode's attention waits for."""


def test_a_machine_that_does_as_predicted_is_found_to_reach_the_constants(quick_limits):
    result = measure.measure(measure.load(str(TINY)), prompt=600, generated=4, repeats=1)
    now = Limits("avx2", 2, 10.0, 100.0)
    told = predict(result.costs, TRUTH, now, 600, result.context)
    attention = (
        result.costs.kv_bytes(result.context) / (TRUTH.cache * 10e9),
        result.costs.prefill_attention_flops(600) / (TRUTH.prefill_attention * 100e9),
    )
    decode, prefill = (
        Phase(seconds, {"attention": (5, spent, 0.0)})
        for seconds, spent in zip((told.step_seconds, told.prefill_seconds), attention)
    )
    # Two more runs, on a machine that was twice and four times as fast.
    runs = [
        Repeat(Limits("avx2", 2, 10.0 * f, 100.0 * f), told.prefill_seconds / f, told.step_seconds / f)
        for f in (1, 2, 4)
    ]
    found = predictions.reached(replace(result, repeats=runs, prefill=prefill, decode=decode))
    assert (found.weights, found.products, found.cache, found.prefill_attention) == pytest.approx(
        (TRUTH.weights, TRUTH.products, TRUTH.cache, TRUTH.prefill_attention), rel=1e-6
    )
    assert found.decode_attention < TRUTH.decode_attention, "it waited for the cache"


def test_constants_are_fitted_from_the_points_that_tell():
    def row(point, *shares):
        return predictions.Row(
            "a",
            "int4",
            predictions.Point.parse(point),
            Limits("avx2", 2, 10.0, 100.0),
            (1.0, 1.0),
            (1.0, 1.0),
            (1.0, 1.0),
            Efficiency(*shares),
            TRUTH,
        )

    found = predictions.fitted(
        [
            row("512@512", 0.9, 0.8, 9.0, 9.0, 9.0),
            row("16@4096", 0.8, 9.0, 0.5, 0.3, 9.0),
            row("2048@4096x8", 9.0, 0.6, 0.4, 0.6, 0.7),
        ]
    )
    assert astuple(found) == pytest.approx((0.85, 0.7, 0.5, 0.6, 0.7))
    assert math.isnan(predictions.fitted([row("16@16", 0.9, 9.0, 9.0, 9.0, 9.0)]).products)


def test_the_tables_go_between_their_lines(tmp_path, monkeypatch, quick_limits):
    page = tmp_path / "page.md"
    begin, end = markers(predictions.SCRIPT)
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "x",
            "--shape",
            str(TINY),
            "--dtype",
            "bfloat16",
            "fp32",
            "int4",
            "--points",
            "30@20",
            "20@40x3",
            "--repeats",
            "1",
            "--generate",
            "4",
            "--into",
            str(page),
        ],
    )
    predictions.main()
    text = page.read_text()
    assert (
        text.startswith(f"before\n{begin}\n`python benchmarks/predictions.py --shape")
        and text.endswith(f"|\n{end}\nafter\n")
        and "old" not in text
    )
    assert [text.count(f"| tiny | {dtype} | ") for dtype in ("bfloat16", "float32", "int4")] == [
        2,
        2,
        2,
    ] and text.count("| 3 x 40 |") == 3
    assert text.count("| - (") == 3 * 4, "no point here tells of many rows and long contexts"
    in_use = efficiency(limits.measure().isa, torch.bfloat16, "int4")
    assert re.search(rf"\| int4 \| [\d.]+ \({in_use.weights:.2f}\) \| - \({in_use.products:.2f}\) \|", text)
    page.write_text("no lines")
    with pytest.raises(ValueError, match="needs the lines"):
        predictions.main()


def test_points():
    assert predictions.Point.parse("512@16384") == predictions.Point(512, 16384, 1) and predictions.Point.parse(
        "1@2x3"
    ) == predictions.Point(1, 2, 3)
    with pytest.raises(Exception, match="PROMPT@CONTEXT"):
        predictions.Point.parse("512")
