"""Products with quantised weights, on every instruction set. They are compared with their definition in float64 on
quantised inputs, and bit for bit between instruction sets, batches and threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pace import _C
from pace.ops import native, reference
from pace.ops.weight import LEVEL_FACTORS
from pace.ops.weight_layout import CODEBOOKS, SMALL_CODES, MixedLayout, QuantizedRows, WeightLayout
from tests.ops.isas import ALL, each_isa

EPS = 2.0**-24

LAYOUTS = [
    WeightLayout("int8", None),
    WeightLayout("int8", 16),
    WeightLayout("int8", 32, has_mins=True),
    WeightLayout("int8", 128),
    WeightLayout("int4", None),
    WeightLayout("int4", 16, has_mins=True),
    WeightLayout("int4", 32),
    WeightLayout("int4", 48),
    WeightLayout("int4", 64, has_mins=True),
    WeightLayout("int4", 256),
    *(WeightLayout("int4", 32, codebook=name) for name in CODEBOOKS),
    WeightLayout("int4", None, codebook="nf4"),
    WeightLayout("float8", None),
    WeightLayout("float8", 32),
    WeightLayout("float8", 128),
    WeightLayout("int1", 128),
    WeightLayout("int2", 64, offset=1),
    WeightLayout("int2", 256, offset=1),
    WeightLayout("int2", 96, has_mins=True),
    WeightLayout("int2", None, offset=1, token_inputs=True),
]  # fmt: skip
TOKENS = LAYOUTS[-1]
SIZES = [
    (1, 1),
    (16, 15),
    (33, 16),
    (50, 17),
    (15, 31),
    (17, 32),
    (64, 33),
    (21, 100),
    (81, 128),
    (40, 129),
    (70, 300),
    (35, 1100),
]


def random_rows(n: int, k: int, layout: WeightLayout, ordered: bool = False) -> QuantizedRows:
    """Rows with all codes of the layout (except float8's NaN). Scales and minima have both signs and span five orders
    of magnitude."""
    if layout.code == "int8":
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    elif layout.code in SMALL_CODES:
        codes = torch.randint(0, 1 << SMALL_CODES[layout.code], (n, k), dtype=torch.uint8)
    else:
        codes = torch.randint(0, 127, (n, k), dtype=torch.uint8) + 128 * torch.randint(0, 2, (n, k), dtype=torch.uint8)
    scales = torch.randn(n, layout.num_groups(k)) * 10.0 ** torch.randint(-3, 3, (n, 1))
    mins = 8 * torch.randn_like(scales) * scales if layout.has_mins else None
    return QuantizedRows(layout, codes, scales, mins, torch.randperm(k) if ordered else None)


def packed(rows: QuantizedRows, glu: bool = False) -> native.PackedWeight:
    weight = native.empty_weight(*rows.shape, rows.layout, glu, rows.order)
    native.pack_quantized_(weight, rows, 0)
    return weight


def input_group(layout: WeightLayout) -> int:
    return next(size for size in (128, 64, 32, 16) if (layout.group or 128) % size == 0)


def quantized_inputs(x: Tensor, rows: QuantizedRows) -> Tensor:
    """x in float64, rounded like the inputs of products: int8 codes and a scale for each group, in the order of the
    columns of codes."""
    if rows.order is not None:
        x = x[:, rows.order]
    if rows.layout.code == "float8":
        return x.double()
    if rows.layout.token_inputs:
        factor = 1 / x.abs().amax(1, keepdim=True).clamp(min=1e-5) * 127
        return (x * factor).round().double() * (1 / factor).double()
    parts = []
    for part in x.split(input_group(rows.layout), dim=1):
        scale = part.abs().amax(1, keepdim=True) / 127
        codes = torch.where(scale > 0, part / scale, 0.0).round().clamp(-127, 127)
        parts.append(codes.double() * scale.double())
    return torch.cat(parts, 1)


def columns_of_codes(matrix: Tensor, rows: QuantizedRows) -> Tensor:
    return matrix if rows.order is None else matrix[:, rows.order]


def assert_close_to_definition(
    got: Tensor, x: Tensor, weight: native.PackedWeight, rows: QuantizedRows, what: str
) -> None:
    """The error bound is for a chain of fp32 additions of terms that were each rounded twice. There are one or two
    terms for each group, or one for each k in float8."""
    w = columns_of_codes(native.unpack(weight).double(), rows)
    inputs = quantized_inputs(x, rows)
    # A term is a group's dot product times its scale; cancellation inside the dot product is exact. Minima are separate
    # terms.
    magnitude = inputs.abs() @ w.abs().T
    if rows.layout.has_mins:
        group = rows.layout.group
        mins = rows.mins.repeat_interleave(group, 1)[:, : rows.shape[1]].double().abs() * (1 + 2.0**-10)
        magnitude = magnitude + 2 * inputs.abs() @ mins.T
    terms = rows.shape[1] if rows.layout.code == "float8" else 2 * -(-rows.shape[1] // input_group(rows.layout))
    bound = 2 * (terms + 3) * EPS * magnitude + 1e-37
    difference = (got.double() - inputs @ w.T).abs()
    assert (difference <= bound).all(), f"{what}: {(difference / bound).max():.3g} times the bound"


def in_pairs(rows: QuantizedRows) -> QuantizedRows:
    """int4 codes packed two in a byte, as in files. Unrelated bytes follow each row, and the high bits of an odd row's
    last byte are also unrelated."""
    n, k = rows.shape
    codes = torch.nn.functional.pad(rows.codes, (0, k % 2), value=9)
    wide = torch.full((n, codes.shape[1] // 2 + 3), 0xEE, dtype=torch.uint8)
    wide[:, :-3] = codes[:, ::2] | codes[:, 1::2] << 4
    return replace(rows, codes=wide[:, :-3], paired_k=k)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.code == "int4"], ids=str)
def test_codes_in_pairs_are_the_same_codes(layout):
    """Packed weights are equal byte for byte, from pieces that cut panels and halves of a gate/up weight."""
    for n, k in SIZES:
        for glu in {False, n % 2 == 0}:
            rows = random_rows(n, k, layout, ordered=True)
            pairs = in_pairs(rows)
            assert (
                pairs.shape == rows.shape
                and pairs.nbytes == rows.nbytes
                and torch.equal(pairs.unpaired().codes, rows.codes)
            )
            assert torch.equal(pairs.dequantize(), rows.dequantize())
            weight = native.empty_weight(n, k, layout, glu, rows.order)
            for start, stop in ((n // 3, n), (0, n // 3)):
                mins = pairs.mins[start:stop] if layout.has_mins else None
                native.pack_quantized_(
                    weight,
                    replace(pairs, codes=pairs.codes[start:stop], scales=pairs.scales[start:stop], mins=mins),
                    start,
                )
            expected = packed(rows, glu)
            assert torch.equal(weight._buffer[: weight.nbytes], expected._buffer[: expected.nbytes]), (n, k, glu)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_unpacking_gives_the_definition(layout):
    for n, k in SIZES:
        for ordered in (False, True):
            rows = random_rows(n, k, layout, ordered)
            weight = packed(rows)
            unpacked = native.unpack(weight)
            got, expected = columns_of_codes(unpacked, rows), columns_of_codes(rows.dequantize(), rows)
            # Rounding of scales and minima in groups, 2^-11 each; of levels, half a step of the largest.
            scales = rows.scales.abs().repeat_interleave(layout.group or k, 1)[:, :k]
            bound = torch.zeros(n, k) if layout.group is None else expected.abs() * 2.0**-11
            if layout.has_mins:
                bound = (scales * 128 + rows.mins.abs().repeat_interleave(layout.group, 1)[:, :k]) * 2.0**-11
            bound = bound + expected.abs() * 2 * EPS
            if layout.codebook in ("nf4", "fp4"):
                bound = bound + scales * {"nf4": 0.0029, "fp4": 0.0032}[layout.codebook] * (1 + 2.0**-10)
            assert ((got - expected).abs() <= bound + 1e-9 * scales.amax(1, keepdim=True)).all(), (n, k)
            ids = torch.tensor([n - 1, 0, n // 2, n - 1])
            assert torch.equal(native.embedding(ids, weight), unpacked[ids])


def test_scales_of_a_group_that_were_float16_stay_exact():
    scales = torch.cat([torch.tensor([65504.0, 2.0**-24, 1.0]), torch.randn(61)]).half().float().view(4, 16)
    rows = QuantizedRows(WeightLayout("int8", 16), torch.full((4, 256), 3, dtype=torch.int8), scales)
    assert torch.equal(native.unpack(packed(rows)), rows.dequantize())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_products_follow_their_definition(layout):
    """Products of integer codes have the same bits on every instruction set."""
    for i, (n, k) in enumerate(SIZES):
        rows = random_rows(n, k, layout, ordered=i % 3 == 0)
        counts = ((1, 2, 5, 9), (3, 4, 17, 33), (6, 7, 13, 130))[i % 3]
        inputs = [torch.randn(m, k) * 10.0 ** torch.randint(-2, 3, (m, 1)) for m in counts]
        expected: list[Tensor] = []
        for isa in each_isa(ALL):
            weight = packed(rows)
            found = [native.linear(x, weight) for x in inputs]
            for x, got in zip(inputs, found):
                if not expected or layout.code == "float8":
                    assert_close_to_definition(got, x, weight, rows, f"{isa}, {len(x)} x {n} x {k}")
            if expected and layout.code != "float8":
                assert all(map(torch.equal, found, expected)), (isa, n, k)
            expected = expected or found


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], LAYOUTS[2], LAYOUTS[6], LAYOUTS[8], LAYOUTS[10], LAYOUTS[15], *LAYOUTS[-5:-2], TOKENS],
    ids=str,
)
def test_rows_are_the_same_bits_however_they_are_batched(isa, layout):
    _C.select_isa(isa)
    rows = random_rows(80, 600, layout)
    weight, bias, x = packed(rows), torch.randn(80), torch.randn(141, 600)
    whole = native.linear(x, weight, bias, "gelu_new")
    for threads, counts in ((1, [1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 33, 128]), (2, [1, 5, 17, 128])):
        _C.set_num_threads(threads)
        for count in counts:
            for part in (slice(0, count), slice(count, 2 * count), slice(141 - count, 141)):
                got = native.linear(x[part], weight, bias, "gelu_new")
                assert torch.equal(got, whole[part]), f"{count} rows, {threads} threads, {part}"


@pytest.mark.parametrize("isa", ALL)
def test_the_largest_codes_do_not_saturate(isa):
    """Inputs are 127 and weights are at both ends. Sums in 16 bits reach 2 * 128 * 127 and 8 * 2 * 15 * 127."""
    _C.select_isa(isa)
    k = 256
    signs = torch.cat(
        [torch.ones(1, k), -torch.ones(1, k), 1 - 2.0 * (torch.arange(k) % 2).view(1, k), torch.randn(1, k).sign()]
    )
    for layout, ends in ((WeightLayout("int8", None), (-128, 127)), (WeightLayout("int8", 32), (-128, 127)),
    (WeightLayout("int4", 128), (0, 15)),
                          (WeightLayout("int4", None), (0, 15)), (WeightLayout("int4", 32, codebook="iq4_nl"), (0,
                           15)), (WeightLayout("int1", 128), (0, 1)), (WeightLayout("int2", 256, offset=1), (0, 3)),
                           (TOKENS, (0, 3))):  # fmt: skip
        ends = torch.tensor(ends, dtype=torch.int8 if layout.code == "int8" else torch.uint8)
        codes = torch.cat([ends[[0]].expand(1, k), ends[[1]].expand(1, k), ends[torch.randint(2, (14, k))]])
        rows = QuantizedRows(layout, codes, torch.ones(16, layout.num_groups(k)))
        expected = 127 * signs.double() @ rows.dequantize().double().T
        assert torch.equal(native.linear(127 * signs, packed(rows)).double(), expected)
        assert torch.equal(native.linear(127 * signs.repeat(9, 1), packed(rows)).double(), expected.repeat(9, 1))


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize(
    "layout",
    [
        WeightLayout("int8", None),
        WeightLayout("int8", 32),
        WeightLayout("int4", 32, has_mins=True),
        WeightLayout("float8", 32),
    ],
    ids=str,
)
def test_extreme_scales_of_weights_and_inputs(isa, layout):
    _C.select_isa(isa)
    for scale, size in ((1e-38, 1e20), (1e30, 1e-25), (1e-44, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1e-42)):
        rows = random_rows(40, 100, layout)
        mins = None if rows.mins is None else torch.full_like(rows.mins, -3 * scale)
        rows = replace(rows, scales=torch.full_like(rows.scales, scale), mins=mins)
        x = torch.randn(3, 100) * size
        got, inputs = native.linear(x, packed(rows)), quantized_inputs(x, rows)
        assert got.isfinite().all(), (scale, size)
        largest = 448 if layout.code == "float8" else 128
        magnitude = inputs.abs() @ (rows.scales[0, 0].double().abs() * largest).expand(100, 40)
        subnormal = (
            100 * 448 * (x.abs().max().double() + 1) * 2.0**-149
        )  # subnormal products, and subnormal scales in fp32
        difference = (got.double() - inputs @ rows.dequantize().double().T).abs()
        assert (difference <= 2.0**-10 * magnitude + subnormal + 1e-37).all(), (scale, size)


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize(
    "layout",
    [
        WeightLayout("int8", None),
        WeightLayout("int4", 32, has_mins=True),
        WeightLayout("int4", 32, codebook="nf4"),
        WeightLayout("float8", 32),
        TOKENS,
    ],
    ids=str,
)
def test_an_input_that_is_not_finite_spoils_its_row_alone(isa, layout):
    _C.select_isa(isa)
    weight = packed(random_rows(40, 100, layout))
    for m in (2, 20):
        x = torch.randn(m, 100)
        expected = native.linear(x, weight)
        for bad in (float("nan"), float("inf"), -float("inf")):
            x[1, 77] = bad
            got = native.linear(x, weight)
            assert not got[1].isfinite().any(), (m, bad)
            assert torch.equal(got[torch.arange(m) != 1], expected[torch.arange(m) != 1]), (m, bad)


@pytest.mark.parametrize("group", [None, 16])
def test_a_float8_nan_spoils_its_output_alone(group):
    """In the unpacked weight, the NaN's whole group is NaN."""
    rows = random_rows(20, 40, WeightLayout("float8", group))
    rows.codes[3, 39] = 0xFF
    for isa in each_isa(ALL):
        weight = packed(rows)
        assert torch.equal(native.unpack(weight).isnan()[3], torch.arange(40) >= (32 if group else 0)), isa
        for m in (1, 2, 9):
            assert torch.equal(native.linear(torch.randn(m, 40), weight).isnan(), (torch.arange(20) == 3).expand(m, 20))


def test_scales_of_float8_end_where_kernels_would_overflow():
    rows = random_rows(3, 20, WeightLayout("float8", 16))
    with pytest.raises(ValueError, match="less than 2\\^120"):
        packed(replace(rows, scales=torch.full_like(rows.scales, 2.0**120)))
    largest = replace(
        rows, scales=torch.full_like(rows.scales, 2.0**120 - 2.0**109), codes=torch.full_like(rows.codes, 0x01)
    )
    for m in (1, 9):
        got = native.linear(torch.eye(20)[:m], packed(largest))
        assert torch.equal(got, largest.dequantize().T[:m])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_epilogues_and_norms_see_the_product(layout):
    rows, bias, residual = random_rows(38, 64, layout, ordered=True), torch.randn(38), torch.randn(9, 38)
    x, weight = torch.randn(9, 64), packed(rows)
    plain = native.linear(x, weight)
    for b in (None, bias):
        for r in (None, residual):
            expected = torch.relu(plain if b is None else plain + b)
            assert torch.equal(native.linear(x, weight, b, "relu", r), expected if r is None else r + expected)
        gate, up = (plain if b is None else plain + b).chunk(2, 1)
        assert torch.equal(native.linear_glu(x, packed(rows, glu=True), "relu", b), torch.relu(gate) * up)


def test_inputs_may_be_strided_misaligned_and_empty():
    rows, x = random_rows(20, 33, WeightLayout("int4", 32)), torch.randn(5, 60)
    weight = packed(rows)
    assert torch.equal(native.linear(x[:, 3:36], weight), native.linear(x[:, 3:36].contiguous(), weight))
    assert native.linear(torch.empty(0, 33), weight).shape == (0, 20)


@pytest.mark.parametrize("glu", [False, True])
def test_rows_may_be_packed_in_pieces(glu):
    for layout in LAYOUTS:
        rows = random_rows(70, 60, layout)
        weight = native.empty_weight(70, 60, layout, glu)
        assert not native.unpack(weight).any()
        for begin, end in [(50, 70), (0, 3), (3, 50)]:
            mins = None if rows.mins is None else rows.mins[begin:end]
            native.pack_quantized_(
                weight, QuantizedRows(layout, rows.codes[begin:end], rows.scales[begin:end], mins), begin
            )
        assert torch.equal(native.unpack(weight), native.unpack(packed(rows)))


def test_codes_of_another_stride_are_packed():
    rows = random_rows(20, 40, WeightLayout("int8", 16))
    expected = native.unpack(packed(rows))
    wide = torch.zeros(20, 90, dtype=torch.int8)
    wide[:, 7:47] = rows.codes
    assert torch.equal(native.unpack(packed(replace(rows, codes=wide[:, 7:47]))), expected)
    assert torch.equal(native.unpack(packed(replace(rows, codes=rows.codes.T.contiguous().T))), expected)


def test_factors_of_codebooks_keep_what_they_promise():
    for name, factor in LEVEL_FACTORS.items():
        levels = torch.tensor(CODEBOOKS[name], dtype=torch.float64)
        off = ((levels * factor).round() / factor - levels).abs().max() / levels.abs().max()
        assert (levels * factor).abs().max() <= 127
        assert off <= {"nf4": 0.0029, "fp4": 0.0032, "mxfp4": 0.0, "iq4_nl": 0.0}[name]


def test_nbytes_are_those_of_the_layout():
    assert native.weight_nbytes(32, 64, WeightLayout("int4", 32)) == 64 + 64 + 2 * (2 * 16 * 2 + 16 * 64 // 2)
    assert native.weight_nbytes(32, 64, WeightLayout("int8", None)) == 64 + 4 * 32 + 2 * 16 * 64
    assert native.weight_nbytes(17, 40, WeightLayout("int4", 32, has_mins=True)) == 64 + 64 + 2 * (
        2 * 2 * 16 * 2 + 16 * 64 // 2
    )


def test_the_reference_multiplies_the_same_values():
    rows = random_rows(20, 64, WeightLayout("int8", None))
    weight = reference.empty_weight(20, 64, rows.layout)
    reference.pack_quantized_(weight, rows, 0)
    assert torch.equal(reference.unpack(weight), native.unpack(packed(rows)))


@pytest.mark.parametrize("isa", ALL)
def test_inputs_of_a_token_are_rounded_alike_by_both_backends(isa):
    """Sums are exact, so that the results are equal to the bit. Rows of floats next to them keep their own inputs."""
    _C.select_isa(isa)
    for n, k in SIZES:
        rows, x = random_rows(n, k, TOKENS), torch.randn(7, k) * 10.0 ** torch.randint(-6, 3, (7, 1))
        x[0] = 0
        weight = reference.empty_weight(n, k, TOKENS)
        reference.pack_quantized_(weight, rows, 0)
        for m in (1, 7):
            assert torch.equal(native.linear(x[:m], packed(rows)), reference.linear(x[:m], weight)), (n, k, m)
    floats, mixed = torch.randn(9, k), MixedLayout(((n, TOKENS), (9, torch.float32)))
    ours, theirs = (ops.empty_weight(n + 9, k, mixed) for ops in (native, reference))
    for ops, weight in ((native, ours), (reference, theirs)):
        ops.pack_quantized_(weight, rows, 0)
        ops.pack_rows_(weight, floats, n)
    found, expected = native.linear(x, ours), reference.linear(x, theirs)
    assert torch.equal(found[:, :n], expected[:, :n])
    assert torch.allclose(found[:, n:], expected[:, n:], rtol=0, atol=2 * k * EPS * x.abs().max() * floats.abs().max())
