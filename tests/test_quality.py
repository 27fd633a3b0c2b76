"""Quality loss of each format on the bundled model, with bounds a little above the measured values, so that a format
that gets worse fails.

Measured with `benchmarks/quality.py --texts 50`, on the first texts of the held-out file; the bounds are a quarter
higher. docs/quantization.md has figures for the whole file."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from pace.assets import TINY
from pace.calibrate import quantize_checkpoint
from pace.eval import Evaluation, evaluate, read_texts
from pace.llm import LLMModel, QuantizationConfig
from tests.plugins.tiers import sample

pytest.importorskip("transformers")
HELDOUT, CALIBRATION = (
    Path(__file__).parent / "data" / name for name in ("tiny_heldout.jsonl", "tiny_calibration.jsonl")
)

KL_BOUNDS: dict[str, tuple[dict, float]] = {
    "int8": ({}, 0.00037),
    "fp8": ({}, 0.0015),
    "mxfp8": ({}, 0.0021),
    "int4 group 32": ({"group": 32}, 0.01),
    "int4": ({}, 0.012),
    "int4 group 128": ({"group": 128}, 0.016),
    "int4 with zero points": ({"group": 32, "symmetric": False}, 0.0096),
    "nf4": ({}, 0.012),
    "fp4": ({}, 0.02),
    "mxfp4": ({}, 0.026),
}
"""Name -> options, and the upper bound of the mean KL divergence to bfloat16."""


@functools.cache
def quality(name: str) -> Evaluation:
    format, options = name.split(" ")[0], KL_BOUNDS[name][0]
    with (
        LLMModel(TINY, progress=False) as exact,
        LLMModel(TINY, quantization=QuantizationConfig(format, **options), progress=False) as model,
    ):
        return evaluate(model, read_texts(HELDOUT)[:50], exact, progress=False)


PROMISED = ("int8", "nf4", "fp4", "int4", "int4 group 32", "int4 group 128")


@pytest.mark.parametrize("name", sample(list(KL_BOUNDS), always=PROMISED.__contains__))
def test_no_format_got_worse(name):
    bound, found = KL_BOUNDS[name][1], quality(name)
    assert found.num_tokens == 4137 and bound / 3 < found.kl_divergence < bound, f"{name}: {found}"


def test_what_is_promised_of_formats():
    assert quality("int8").kl_divergence <= 0.005 and quality("int8").top1_agreement >= 0.98
    assert quality("nf4").kl_divergence < quality("fp4").kl_divergence
    assert (
        quality("int4 group 32").kl_divergence < quality("int4").kl_divergence < quality("int4 group 128").kl_divergence
    )


@pytest.mark.rotates
def test_calibration_loses_a_quarter_less(tmp_path):
    """The bound is a quarter; the measured reduction is three fifths, with these few tokens."""
    quantize_checkpoint(
        TINY, tmp_path / "out", "int4", read_texts(CALIBRATION), max_tokens=4096, progress=False, report=False
    )
    with LLMModel(TINY, progress=False) as exact, LLMModel(tmp_path / "out", progress=False) as model:
        found = evaluate(model, read_texts(HELDOUT)[:50], exact, progress=False)
    assert found.kl_divergence < 0.005 < 0.75 * quality("int4").kl_divergence and found.top1_agreement > 0.965
