"""The quantising kernels give the bits of the formats' definitions in torch, on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch

from pace import _C
from pace.ops import native
from pace.ops.weight_layout import QuantizedRows
from pace.quant.format import ordered_sum
from tests.quant.test_formats import EVERY, heavy_tailed

ISAS = _C.available_isas()


pytestmark = pytest.mark.usefixtures("restore_isa_and_threads")


def cases(k: int) -> dict[str, torch.Tensor]:
    """Name of a special case -> rows of k elements."""
    generator = torch.Generator().manual_seed(k)
    x = heavy_tailed(11, k, seed=k)
    zeros = x.clone()
    zeros[::2, : k // 2] = 0
    return {
        "heavy tails": x,
        "bfloat16": x.bfloat16(),
        "float16": x.half(),
        "float64": x.double() * math.pi,
        "zeros": zeros,
        "minus zeros": torch.full((2, k), -0.0),
        "as large to both sides": torch.randint(-3, 4, (40, k), generator=generator).float(),
        "halfway": torch.randint(-254, 255, (20, k), generator=generator) / 2,
        "constant": torch.full((2, k), -0.7),
        "nearly constant": 0.7 + 1e-7 * torch.rand(5, k, generator=generator),
        "one sign": 3 + torch.rand(5, k, generator=generator),
        "subnormal": x * 1e-41,
        "with subnormal scales": x * 1e-38,
        "huge": x / x.abs().max() * 3.4e38,
    }


def assert_same(found: QuantizedRows, defined: QuantizedRows, what: object) -> None:
    found = found.unpaired()
    assert (found.layout, found.shape) == (defined.layout, defined.shape), what
    assert torch.equal(found.codes, defined.codes), what
    for values, expected in ((found.scales, defined.scales), (found.mins, defined.mins)):
        assert (values is None) == (expected is None), what
        assert values is None or torch.equal(values.view(torch.int32), expected.view(torch.int32)), what


@pytest.mark.parametrize("format", EVERY, ids=repr)
def test_the_bits_of_the_definition(format):
    for k in (1, 15, 16, 17, 63, 64, 100, 129, 600):
        for case, x in cases(k).items():
            defined = format.quantize(x)
            for isa in ISAS:
                _C.select_isa(isa)
                assert_same(native.quantize(x, format), defined, (k, case, isa))


@pytest.mark.parametrize("format", EVERY, ids=repr)
def test_any_strides_and_threads(format):
    x = heavy_tailed(300, 130)
    wide = torch.full((300, 150), math.nan)
    wide[:, 7:137] = x
    for threads in (1, 3):
        _C.set_num_threads(threads)
        for view in (x, x.T.contiguous().T, wide[:, 7:137]):
            assert_same(native.quantize(view, format), format.quantize(x), threads)
        assert native.quantize(x[:0], format).shape == (0, 130)
    assert wide[:, :7].isnan().all() and torch.equal(wide[:, 7:137], x)


@pytest.mark.parametrize("format", EVERY, ids=repr)
def test_what_is_not_finite_is_refused_by_the_tensors_name(format):
    """Tests NaN and both infinities at several places, on every instruction set."""
    values = (math.nan, math.inf, -math.inf)
    for i, place in enumerate([(77, 599), (0, 0), (50, 64), (99, 17)]):
        for j, isa in enumerate(ISAS):
            _C.select_isa(isa)
            x, bad = heavy_tailed(100, 600).bfloat16(), values[(i + j) % 3]
            x[place] = bad
            with pytest.raises(ValueError, match=rf"layers.3.mlp.down_proj.weight holds {bad}"):
                native.quantize(x, format, "layers.3.mlp.down_proj.weight")
                pytest.fail(f"{bad} at {place} is taken on {isa}")


def test_sums_are_sixteen_and_then_halves():
    x = heavy_tailed(3, 50)
    for row, total in zip(x, ordered_sum(x)):
        sums = [torch.zeros(()) for _ in range(16)]
        for i, value in enumerate(row):
            sums[i % 16] = sums[i % 16] + value
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [sums[i] + sums[i + half] for i in range(half)]
        assert sums[0] == total
    assert torch.equal(ordered_sum(x[:, :1]), x[:, 0])
