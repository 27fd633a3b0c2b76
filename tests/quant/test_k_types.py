"""The types of ggml: kernels against their definitions and, if it has one, the gguf package's rounding. They must be as
accurate as llama.cpp's search."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pace import _C
from pace.ops import native
from pace.ops.weight_layout import SUPER_BLOCK
from pace.quant import FORMATS
from tests.quant.test_formats import heavy_tailed
from tests.quant.test_kernels import cases

K_TYPES = [name for name in FORMATS if name.endswith("_k")]
BLOCK_TYPES = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]
OF_FEW_LEVELS = ["q1_0", "q2_0", "tq1_0", "tq2_0"]

pytestmark = pytest.mark.usefixtures("restore_isa_and_threads")


def k_type_cases() -> dict[str, torch.Tensor]:
    """Name of a special case -> rows of 768. Huge weights are missing, because float16 scales cannot represent them."""
    others = {name: x for name, x in cases(768).items() if name != "huge"}
    x = heavy_tailed(7, 768)
    return others | {"other sign": -3 - torch.rand(5, 768), "float16's subnormals as scales": x * 1e-6}


@pytest.mark.parametrize("name", K_TYPES)
def test_kernels_have_the_bits_of_the_definition(name):
    format = FORMATS[name]()
    for case, x in k_type_cases().items():
        defined = format.quantize(x)
        assert defined.dequantize().isfinite().all()
        for isa in _C.available_isas():
            _C.select_isa(isa)
            found = native.quantize(x, format).unpaired()
            for ours, expected in zip(found.tensors(), defined.tensors()):
                assert (ours is None) == (expected is None)
                assert ours is None or torch.equal(ours.view(torch.uint8), expected.view(torch.uint8)), (case, isa)


@pytest.mark.parametrize("name", K_TYPES)
def test_rows_come_in_any_pieces_strides_and_threads(name):
    format, x = FORMATS[name](), heavy_tailed(70, 512).bfloat16()
    rows = format.quantize(x).dequantize()
    for threads in (1, 3):
        _C.set_num_threads(threads)
        for piece in (slice(0, 1), slice(13, 64), slice(64, 70)):
            assert torch.equal(native.quantize(x[piece], format).dequantize(), rows[piece])
        assert torch.equal(native.quantize(x.T.contiguous().T, format).dequantize(), rows)
    assert native.quantize(x[:0], format).shape == format.quantize(x[:0]).shape == (0, 512)


@pytest.mark.parametrize("name", K_TYPES)
def test_what_has_no_place_is_refused_by_the_tensors_name(name):
    format = FORMATS[name]()
    with pytest.raises(ValueError, match="down_proj has rows of 300 weights.*256"):
        native.quantize(torch.zeros(2, 300), format, "down_proj")
    for bad, told in ((math.nan, "down_proj holds nan"), (3e38, f"down_proj reaches 3e.38.*float16 scales of {name}")):
        x = torch.ones(3, 512)
        x[2, 300] = bad
        with pytest.raises(ValueError, match=told):
            native.quantize(x, format, "down_proj")


@pytest.mark.parametrize("name", K_TYPES)
def test_narrow_rows_take_another_type(name):
    format = FORMATS[name]()
    assert format.for_width(4 * SUPER_BLOCK) is format
    assert {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}[name] == format.for_width(
        896
    ).name


def test_codes_are_not_worse_than_rounding_between_ends():
    """Compares each group of q4_k with 15 steps from its smallest weight (or zero) to its largest, with scales in 63rds
    of the largest."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    rows = FORMATS["q4_k"]().quantize(x)
    groups = x.unflatten(1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    assert (rows.dequantize() - x).norm() < 0.97 * (plain.flatten(1) - x).norm()


@pytest.mark.parametrize("name", BLOCK_TYPES + OF_FEW_LEVELS)
def test_blocks_are_rounded_as_the_gguf_package_rounds(name):
    gguf = pytest.importorskip("gguf")
    from tests.quant import ternary_types

    kind = ternary_types.kind_of(name.upper())
    package = ternary_types if kind in ternary_types.SIZES else gguf.quants
    others = [torch.zeros(1, 768), torch.full((1, 768), 0.7), torch.full((1, 768), -0.0)]
    halves = torch.randint(-2, 3, (4, 768), generator=torch.Generator().manual_seed(1)) / 2
    x = torch.cat([heavy_tailed(9, 768).clamp(-6e4, 6e4), *others, halves])
    expected = package.dequantize(package.quantize(x.numpy(), kind), kind)
    found = FORMATS[name]().quantize(x).dequantize()
    assert torch.equal(found, torch.from_numpy(np.array(expected)))


@pytest.mark.parametrize("name, block", [*zip(OF_FEW_LEVELS, (128, 64, 256, 256))])
def test_types_of_few_levels_need_whole_blocks_and_float16_scales(name, block):
    format = FORMATS[name]()
    assert format.for_width(3 * block) is format and format.for_width(3 * block + 32).name == "q4_0"
    with pytest.raises(ValueError, match="beyond float16"):
        native.quantize(torch.full((2, block), 1e5), format)
