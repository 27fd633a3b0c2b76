"""Each format against its published definition, written out as loops over Python's numbers; properties of all formats;
and the accuracy of each."""

from __future__ import annotations

import math

import pytest
import torch

from pace.ops import native
from pace.ops.weight_layout import CODEBOOKS
from pace.quant import FORMATS, FP4, FP8, MXFP4, MXFP8, NF4, Int4, Int8
from pace.quant.nf4 import dynamic_levels

EVERY = [
    *(Int8(), Int8(group=32), Int4(), Int4(32), Int4(128), Int4(None)),
    *(Int4(32, symmetric=False), Int4(symmetric=False), NF4(), FP4(), NF4(double_quantization=True), NF4(128)),
    *(MXFP4(), MXFP8(), FP8(), FP8(64)),
]
PACKED = 2.0**-11
"""Relative rounding of the scales and minima of groups."""


def heavy_tailed(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers with a few much larger ones, in rows of different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    x *= torch.where(torch.rand(rows, k, generator=generator) < 0.01, 8.0, 1.0)
    return x * torch.logspace(-3, 3, rows)[:, None]


# -- definitions -------------------------------------------------------------------------------------------------------


def e4m3(code: int) -> float:
    """Value of a code in the OCP 8-bit Floating Point Specification, table 1: bias 7, subnormals, no infinities; 0x7f
    and 0xff are NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return math.nan if code & 127 == 127 else -value if code & 128 else value


def e2m1(code: int) -> float:
    """Value of a code in OCP Microscaling Formats 1.0, section 5.3.3: bias 1, subnormals."""
    exponent, mantissa = code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else math.ldexp(2 + mantissa, exponent - 2)
    return -value if code & 8 else value


def nearest(x: float, levels: list[float]) -> int:
    """The code of the nearest level; of two equally near, the even code."""
    return min((abs(x - level), code % 2, code) for code, level in enumerate(levels) if not math.isnan(level))[2]


def by_largest(x: list[float], levels: list[float]) -> list[float]:
    """Quantised values, scaled so that the largest level represents the largest magnitude."""
    scale = max(map(abs, x)) / max(level for level in levels if not math.isnan(level))
    return [levels[nearest(value / scale, levels)] * scale if scale else 0.0 for value in x]


def microscaled(x: list[float], levels: list[float], largest_exponent: int) -> list[float]:
    """Quantised values by section 6.3. X is the largest power of two not above max |v|, divided by the largest power of
    two in the element type. v / X is rounded to that type, and clamped to its largest number."""
    largest = max(map(abs, x))
    if largest == 0:
        return x
    scale = 2.0 ** max(math.frexp(largest)[1] - 1 - largest_exponent, -127)
    return [levels[nearest(value / scale, levels)] * scale for value in x]


def least_squares_int4(x: list[float]) -> list[float]:
    """The best of five symmetric scales, in double precision."""
    largest = max(x, key=abs)
    if largest == 0:
        return x
    best = None
    for steps in (7.0, 7.5, 8.0, 8.5, 9.0):
        codes = [min(max(round(value * -steps / largest), -8), 7) for value in x]
        scale = sum(value * code for value, code in zip(x, codes)) / sum(code * code for code in codes)
        error = sum((value - code * scale) ** 2 for value, code in zip(x, codes))
        best = min(best or (math.inf, 0.0), (error, scale))
    return [min(max(round(value / best[1]), -8), 7) * best[1] for value in x]


def between_ends_int4(x: list[float]) -> list[float]:
    """Quantised values with 15 steps from the smallest to the largest. Other choices must not have a larger error."""
    low, step = min(x), (max(x) - min(x)) / 15
    return [low + round((value - low) / step) * step if step else low for value in x]


INTEGERS = [float(code) for code in range(-127, 128)]
E4M3, E2M1 = [e4m3(code) for code in range(256)], [e2m1(code) for code in range(16)]
DEFINITIONS = {
    "int8": lambda x: by_largest(x, INTEGERS),
    "int4": least_squares_int4,
    "nf4": lambda x: by_largest(x, list(CODEBOOKS["nf4"])),
    "fp4": lambda x: by_largest(x, list(CODEBOOKS["fp4"])),
    "mxfp4": lambda x: microscaled(x, E2M1, 2),
    "mxfp8": lambda x: microscaled(x, E4M3, 8),
    "fp8": lambda x: by_largest(x, E4M3),
}


@pytest.mark.parametrize(
    "format", [format for format in EVERY if not getattr(format, "double_quantization", False)], ids=repr
)
@pytest.mark.parametrize("k", [200, 129, 16, 1])
def test_against_the_definition(format, k):
    """The float32 result is as near to the weights as the definition, group by group, except for the rounding of packed
    scales."""
    x = heavy_tailed(6, k)
    x[3, 64:128] = 0
    define = between_ends_int4 if format.layout.has_mins else DEFINITIONS[format.name]
    values = format.quantize(x).dequantize()
    for row, found in zip(x.tolist(), values.tolist()):
        for start in range(0, k, format.layout.group or k):
            group = row[start : start + (format.layout.group or k)]
            defined = define(group)
            largest = max(map(abs, group))
            error, least = (math.dist(group, other) for other in (found[start : start + len(group)], defined))
            assert error <= least * (1 + 1e-4) + PACKED * math.hypot(*group) + 1e-6 * largest
            if format.name != "int4":
                agree = sum(abs(a - b) <= 2 * PACKED * abs(b) for a, b in zip(found[start:], defined))
                assert agree >= len(group) - 1, "codes differ from the definition's where two are as near"


def test_codes_between_two_are_the_even_ones():
    """Exact halves, which occur with floats, are rounded to even as in the standards."""
    e2m1_halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    assert MXFP4().quantize(e2m1_halves[None]).codes.tolist() == [[0, 2, 2, 4, 4, 6, 6, 7]]
    assert MXFP4().quantize(-e2m1_halves[None]).codes.tolist() == [[8, 10, 10, 12, 12, 14, 14, 15]]
    e4m3_halves = [(E4M3[code] + E4M3[code + 1]) / 2 for code in range(126)]
    for start in range(0, 126, 31):
        x = torch.tensor([[*e4m3_halves[start : start + 31], 448.0]])
        assert MXFP8().quantize(x).codes[0, :-1].tolist() == [
            (code + 1) // 2 * 2 for code in range(start, start + x.shape[1] - 1)
        ]


def test_microscaling_scales_are_powers_of_two_of_the_largest():
    x = torch.zeros(7, 32)
    x[:, 5] = torch.tensor([1.0, 0.999, 1.999, 448.0, 2.0**-127, 3e38, 0.0])
    assert MXFP4().quantize(x).scales[:, 0].tolist()[:6] == [0.25, 0.125, 0.25, 64.0, 2.0**-127, 2.0**125]
    assert MXFP8().quantize(x).scales[:, 0].tolist()[:4] == [2.0**-8, 2.0**-9, 2.0**-8, 1.0]


def test_scales_of_groups_are_as_they_are_packed():
    """Scales have eleven bits: a float16 times a power of two, over the whole range of float32."""
    x = heavy_tailed(40, 256) * torch.logspace(-38, 33, 40)[:, None]
    for format in EVERY:
        rows = format.quantize(x)
        for values in () if format.layout.group is None else (rows.scales, rows.mins):
            if values is not None:
                mantissa = torch.frexp(values.double()).mantissa * 2048
                assert torch.equal(mantissa, mantissa.round()), format


def test_int4_is_better_than_the_largest_magnitude_alone():
    """Each group is no worse than with max|x| / 8 and the sign of the largest weight. All are 14 % better than with
    max|x| / 7."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).unflatten(1, (-1, 64))
    found = Int4().quantize(x.flatten(1)).dequantize().view_as(x)
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    signed = (x / (largest / -8)).round().clamp(-8, 7) * (largest / -8)
    plain = (x / (largest.abs() / 7)).round() * (largest.abs() / 7)
    error, signed_error, plain_error = ((x - other).square().sum(-1) for other in (found, signed, plain))
    assert (error <= signed_error * 1.001).all()
    assert error.sum().sqrt() < 0.86 * plain_error.sum().sqrt()


def test_zero_points_follow_weights_of_one_sign():
    x = torch.rand(8, 256, generator=torch.Generator().manual_seed(2)) + 3.0
    with_mins, symmetric = ((Int4(32, kind).quantize(x).dequantize() - x).abs().max() for kind in (False, True))
    assert with_mins < 0.05 < symmetric
    constant = torch.full((2, 64), -2.5)
    assert torch.equal(Int4(symmetric=False).quantize(constant).dequantize(), constant)


def test_nested_scales_are_those_of_bitsandbytes():
    """The definition written out: subtract the mean, divide by the largest of 256, take the nearest of 256 levels."""
    levels = [0.0, 1.0]
    for digits in range(7):
        parts = 2**digits
        for part in range(parts):
            middle = 0.1 + 0.9 * (part + 0.5) / parts
            levels += [middle * 10 ** (digits - 6), -middle * 10 ** (digits - 6)]
    assert torch.allclose(dynamic_levels(), torch.tensor(sorted(levels)), rtol=1e-6, atol=0)
    x = heavy_tailed(1, 64 * 300)
    plain, nested = NF4().quantize(x), NF4(double_quantization=True).quantize(x)
    assert torch.equal(plain.codes, nested.codes)
    largest = x.view(300, 64).abs().amax(1).tolist()
    mean = sum(largest) / 300
    expected = []
    for block in (largest[:256], largest[256:]):
        scale = max(abs(value - mean) for value in block)
        expected += [
            min(levels, key=lambda level: abs((value - mean) / scale - level)) * scale + mean for value in block
        ]
    assert torch.allclose(nested.scales[0], torch.tensor(expected), rtol=2 * PACKED, atol=0)
    assert not torch.allclose(nested.scales, plain.scales, rtol=2 * PACKED, atol=0)


# -- what no format may do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", EVERY, ids=repr)
def test_rows_do_not_know_each_other(format):
    """Rows are independent, so a matrix may be loaded in any pieces. Every dtype of a checkpoint is read."""
    x = heavy_tailed(70, 600).bfloat16()
    rows = format.quantize(x)
    for piece in (slice(0, 1), slice(13, 64), slice(64, 70)):
        part = format.quantize(x[piece])
        assert torch.equal(part.codes, rows.codes[piece]) and torch.equal(part.scales, rows.scales[piece])
        assert part.mins is None or torch.equal(part.mins, rows.mins[piece])
    wide = format.quantize(x.double())
    assert torch.equal(wide.codes, rows.codes) and torch.equal(wide.scales, rows.scales)
    assert format.quantize(x[:0]).shape == (0, 600)


@pytest.mark.parametrize("format", EVERY, ids=repr)
def test_weights_are_left_as_they_are(format):
    """float32 rows are read in place, possibly from a mapped file."""
    x = heavy_tailed(3, 300)
    before = x.clone()
    format.quantize(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("format", EVERY, ids=repr)
def test_zeros_stay_zeros(format):
    x = torch.zeros(3, 300)
    x[1, 7] = 1.0
    values = format.quantize(x).dequantize()
    assert torch.equal(values[0], x[0]) and torch.equal(values[2], x[2])
    assert values.isfinite().all() and abs(values[1, 7] - 1) < 0.3
    assert (values[1, format.layout.group or 300 :] == 0).all()


@pytest.mark.parametrize("format", EVERY, ids=repr)
def test_huge_and_tiny_weights(format):
    """They are as accurate as ordinary weights if float32 can hold the scale. A subnormal scale is a multiple of
    2^-149, and microscaling has none below 2^-127."""
    microscaling = isinstance(format, (MXFP4, MXFP8))
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(3))
    x /= x.abs().max()
    for largest in (3.4e38, 1e30, 1e-30, 1e-37, 1e-40):
        if largest == 1e-40 and microscaling:
            assert format.quantize(torch.full((1, 32), largest)).scales.tolist() == [[2.0**-127]]
            continue
        relative, found = (format.quantize(y).dequantize().double() / y.abs().max() for y in (x, x * largest))
        assert found.isfinite().all(), largest
        bound = (2**-149 / largest) * 448 + 2 * PACKED + (0.5 if microscaling else 0.0)
        assert (found - relative).abs().max() <= bound, largest


@pytest.mark.parametrize("format", EVERY, ids=repr)
def test_what_is_not_finite_is_refused_by_the_tensors_name(format):
    for bad in (math.nan, math.inf, -math.inf):
        x = heavy_tailed(100, 600)
        x[77, 599] = bad
        with pytest.raises(ValueError, match=rf"model.layers.3.mlp.down_proj.weight holds {bad}"):
            format.quantize(x, "model.layers.3.mlp.down_proj.weight")


@pytest.mark.parametrize(
    "format",
    [format for format in EVERY if format.name != "int4" and not getattr(format, "double_quantization", False)],
    ids=repr,
)
def test_what_is_quantised_stays_as_it_is(format):
    values = format.quantize(heavy_tailed(8, 300)).dequantize()
    again = format.quantize(values).dequantize()
    assert torch.allclose(again, values, rtol=2**-22 if format.layout.group is None else PACKED / 8, atol=0)


# -- how good each is --------------------------------------------------------------------------------------------------

# Bounds for relative RMS errors, slightly above the measured values. Weights are normal, or Student's t with 4 degrees
# of freedom, 1024 x 1024 each.
MAX_ERROR = {
    "int8": (0.00793, 0.0185),
    "int4": (0.0906, 0.136),
    "nf4": (0.0924, 0.112),
    "fp4": (0.123, 0.17),
    "mxfp4": (0.115, 0.132),
    "mxfp8": (0.0295, 0.0324),
    "fp8": (0.0258, 0.0241),
    "q2_k": (0.301, 0.348),
    "q3_k": (0.152, 0.186),
    "q4_k": (0.0723, 0.088),
    "q5_k": (0.0365, 0.0445),
    "q6_k": (0.0179, 0.0231),
    "q4_0": (0.0866, 0.117),
    "q4_1": (0.0789, 0.0946),
    "q5_0": (0.0431, 0.0587),
    "q5_1": (0.0382, 0.0459),
    "q8_0": (0.0054, 0.0074),
    "q1_0": (0.603, 0.708),
    "q2_0": (0.721, 0.734),
    "tq1_0": (0.812, 0.848),
    "tq2_0": (0.812, 0.848),
}


@pytest.mark.parametrize("name", FORMATS)
def test_no_format_gets_worse(name):
    torch.manual_seed(0)
    normal, heavy = torch.randn(1024, 1024), torch.distributions.StudentT(4.0).sample((1024, 1024))
    # The kernels give the bits of the definitions (test_kernels.py, test_k_types.py), and are faster.
    found = (native.quantize(x, FORMATS[name]()).unpaired().dequantize() for x in (normal, heavy))
    errors = [((values - x).norm() / x.norm()).item() for values, x in zip(found, (normal, heavy))]
    for error, most in zip(errors, MAX_ERROR[name], strict=True):
        assert 0.98 * most < error <= most, errors
