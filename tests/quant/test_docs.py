"""docs/quantization.md has the right sizes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from pace.bench.shapes import SHAPES
from pace.llm.models.model_list import read_config
from pace.ops import native
from pace.quant import FORMATS, QuantizationConfig

PAGE = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text(encoding="utf-8")


def times_smaller(config: QuantizationConfig) -> str:
    model_class, parsed = read_config(SHAPES["tinyllama-1.1b"])
    model = model_class(parsed, torch.bfloat16, native)
    plain = model.planned_nbytes(native, torch.bfloat16)
    model.quantize(config)
    return f"{plain / model.planned_nbytes(native, torch.bfloat16):.2f}"


def test_the_table_of_formats():
    rows = re.findall(r'^\| `"(\w+)"` \|.*\| ([\d.]+) \| ([\d.]+) \|$', PAGE, re.MULTILINE)
    assert [(name, bits, times) for name, bits, times in rows] == [
        (name, f"{FORMATS[name]().bits_per_weight():.2f}", times_smaller(QuantizationConfig(name))) for name in FORMATS
    ]
    assert f"it is {times_smaller(QuantizationConfig('int4', embedding='int4', lm_head='int4'))} times smaller" in PAGE


def test_the_table_of_errors():
    """The errors that `test_formats` measures and bounds."""
    from tests.quant.test_formats import MAX_ERROR

    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert [name for name, *_ in rows] == list(FORMATS)
    for name, *errors in rows:
        told = map(float, errors)
        assert all(
            0.98 * most - 0.0005 <= error <= most + 0.0005 for error, most in zip(told, MAX_ERROR[name], strict=True)
        ), name
