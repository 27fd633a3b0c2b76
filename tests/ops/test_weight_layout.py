"""Codes and scales: their meaning, refusals, and the parts of a weight."""

import itertools

import pytest
import torch

from pace.ops.weight_layout import (
    CODEBOOKS,
    SMALL_CODES,
    SUPER_BLOCK,
    SUPER_GROUPS,
    MixedLayout,
    QuantizedRows,
    WeightLayout,
    layout_of_rows,
    parts_of,
)


def random_rows(layout: WeightLayout, rows: int = 5, k: int = 80, order: bool = False) -> QuantizedRows:
    groups = layout.num_groups(k)
    codes = {
        "int8": torch.randint(-128, 128, (rows, k), dtype=torch.int8),
        "int4": torch.randint(0, 16, (rows, k), dtype=torch.uint8),
        "int1": torch.randint(0, 2, (rows, k), dtype=torch.uint8),
        "int2": torch.randint(0, 4, (rows, k), dtype=torch.uint8),
        "int5": torch.randint(0, 32, (rows, k), dtype=torch.uint8),
        "float8": torch.randn(rows, k).to(torch.float8_e4m3fn).view(torch.uint8),
    }[layout.code]
    mins = torch.randn(rows, groups) if layout.has_mins else None
    return QuantizedRows(layout, codes, torch.rand(rows, groups) + 0.1, mins, torch.randperm(k) if order else None)


LAYOUTS = [
    WeightLayout(code, group, has_mins, codebook, offset)
    for code, group, has_mins, codebook, offset in itertools.product(
        ("int8", "int4", "int5", "int2", "int1", "float8"), (None, 16, 32, 48), (False, True), (None, *CODEBOOKS),
        (None, 0),
    )
    if not (codebook and (code != "int4" or has_mins)) and not (has_mins and (code == "float8" or group is None))
    and not (code in ("int5", "int2", "int1") and group != 32)
    and not (offset == 0 and (codebook or code in ("int8", "float8", "int1")))
]  # fmt: skip


def test_dequantize_is_the_definition():
    for layout, order in itertools.product(LAYOUTS, (False, True)):
        check_dequantized(random_rows(layout, order=order), layout, order)


def check_dequantized(rows, layout, order):
    values, k = rows.dequantize(), rows.shape[1]
    for row, column in [(0, 0), (1, 15), (2, 16), (3, 47), (4, 79), (0, 78)]:
        code = rows.codes[row, column]
        level = (
            code.view(torch.float8_e4m3fn).item() if layout.code == "float8"
            else CODEBOOKS[layout.codebook][code] if layout.codebook
            else 2.0 * float(code) - 1 if layout.code == "int1"
            else float(code) - (layout.offset or 0)
        )  # fmt: skip
        group = column // (layout.group or k)
        expected = torch.tensor(level) * rows.scales[row, group] + (rows.mins[row, group] if layout.has_mins else 0)
        assert values[row, rows.order[column] if order else column] == expected, (layout, order, row, column)


def super_layout(code: str, has_mins: bool, scale_bits: int, codebook: str | None = None) -> WeightLayout:
    return WeightLayout(code, SUPER_GROUPS[code], has_mins, codebook, 0 if has_mins else None, scale_bits)


SUPER_LAYOUTS = [
    super_layout("int2", True, 4),
    super_layout("int3", False, 6),
    super_layout("int4", True, 6),
    super_layout("int5", True, 6),
    super_layout("int6", False, 8),
    super_layout("int4", False, 6, "iq4_nl"),
]


def random_super_rows(layout: WeightLayout, rows: int = 5, k: int = 512) -> QuantizedRows:
    """Random rows with super-blocks, every number within its range of bits."""
    low, high = (
        (0, 1 << layout.scale_bits) if layout.has_mins else (-1 << layout.scale_bits - 1, 1 << layout.scale_bits - 1)
    )

    def numbers() -> torch.Tensor:
        return torch.randint(low, high, (rows, layout.num_groups(k)), dtype=torch.int8)

    return QuantizedRows(
        layout,
        torch.randint(0, 1 << SMALL_CODES[layout.code], (rows, k), dtype=torch.uint8),
        numbers(),
        numbers() if layout.has_mins else None,
        super_scales=torch.randn(rows, k // SUPER_BLOCK).half(),
        super_mins=torch.randn(rows, k // SUPER_BLOCK).half() if layout.has_mins else None,
    )


@pytest.mark.parametrize("layout", SUPER_LAYOUTS, ids=str)
def test_super_blocks_are_the_definition(layout):
    rows = random_super_rows(layout)
    values = rows.dequantize()
    for row, column in [(0, 0), (1, 15), (2, 16), (3, 255), (4, 256), (0, 511), (2, 300)]:
        code, group = int(rows.codes[row, column]), column // layout.group
        level = CODEBOOKS[layout.codebook][code] if layout.codebook else code - layout.offset
        # Products are exact in float32; a minimum's addition is rounded once.
        value = level * int(rows.scales[row, group]) * float(rows.super_scales[row, column // SUPER_BLOCK])
        if layout.has_mins:
            value += int(rows.mins[row, group]) * float(rows.super_mins[row, column // SUPER_BLOCK])
        assert values[row, column] == torch.tensor(value, dtype=torch.float64).float()
    assert torch.equal(rows.take(slice(1, 3)).dequantize(), values[1:3])
    assert torch.equal(rows.take(torch.tensor([4, 0])).dequantize(), values[[4, 0]])


def test_parts_and_their_rows():
    q4, q6 = SUPER_LAYOUTS[2], SUPER_LAYOUTS[4]
    mixed = MixedLayout(((48, q4), (16, torch.bfloat16), (32, q6)))
    assert parts_of(q4, 7) == ((7, q4),) and parts_of(mixed, 96) == mixed.parts
    assert layout_of_rows(q4, 3, 100) == q4
    assert layout_of_rows(mixed, 0, 48) == q4 and layout_of_rows(mixed, 48, 16) == torch.bfloat16
    assert layout_of_rows(mixed, 64, 32) == layout_of_rows(mixed, 95, 1) == q6
    with pytest.raises(ValueError, match="rows 40 to 50 .* in no one"):
        layout_of_rows(mixed, 40, 10)
    with pytest.raises(ValueError, match="97 rows .* 96"):
        parts_of(mixed, 97)
    with pytest.raises(ValueError, match="two parts"):
        MixedLayout(((48, q4),))
    with pytest.raises(ValueError, match="stored alike are one part; got two of int4"):
        MixedLayout(((48, q6), (16, q4), (32, q4)))


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: WeightLayout("int7", 32), "int8, float8, int1"),
        (lambda: WeightLayout("int2", 16), "group of int2 codes is a multiple of 32"),
        (lambda: WeightLayout("int1", 32, offset=0), "an offset is a code of int2 to int6"),
        (lambda: WeightLayout("int2", 64, offset=1, token_inputs=True), "a scale a row; got int2, group 64, int8"),
        (lambda: WeightLayout("int8", None, token_inputs=True), "token_inputs needs int2"),
        (lambda: WeightLayout("int5", 48), "multiple of 32"),
        (lambda: WeightLayout("int6", 16), "only in super-blocks"),
        (lambda: WeightLayout("int6", 32, scale_bits=8), "int6 in groups of 16; got int6 in groups of 32"),
        (lambda: WeightLayout("int8", 16, scale_bits=8), "super-blocks have codes"),
        (lambda: WeightLayout("int6", 16, scale_bits=4), "6 or 8 without; got 4"),
        (lambda: WeightLayout("int4", 32, codebook="nf4", scale_bits=6), "super-blocks is iq4_nl"),
        (lambda: WeightLayout("iq2_xs", 32, scale_bits=4), "iq2_xs has groups of 16 with scales of 4 bits"),
        (lambda: WeightLayout("iq1_s", 32, scale_bits=4), "scales of 3 bits, and no minima"),
        (lambda: WeightLayout("iq3_s", 32, has_mins=True, scale_bits=4), "no minima"),
        (lambda: WeightLayout("int4", 32, offset=16), "offset"),
        (lambda: WeightLayout("int8", 32, offset=0), "offset"),
        (lambda: QuantizedRows(SUPER_LAYOUTS[4], torch.zeros(1, 128, dtype=torch.uint8), torch.ones(1, 8,
         dtype=torch.int8)), "multiple of 256"),
        (lambda: QuantizedRows(SUPER_LAYOUTS[4], torch.zeros(1, 256, dtype=torch.uint8), torch.ones(1, 16,
         dtype=torch.int8)), "super_scales"),
        (lambda: QuantizedRows(SUPER_LAYOUTS[4], torch.zeros(1, 256, dtype=torch.uint8), torch.ones(1, 16)),
         "torch.int8"),
        (lambda: WeightLayout("int4", 24), "multiple of 16"),
        (lambda: WeightLayout("int4", 0), "multiple of 16"),
        (lambda: WeightLayout("int8", 32, codebook="nf4"), "codebook"),
        (lambda: WeightLayout("int4", 32, codebook="nf5"), "nf4"),
        (lambda: WeightLayout("int8", None, has_mins=True), "minima"),
        (lambda: QuantizedRows(WeightLayout("int4", 32), torch.full((1, 32), 16, dtype=torch.uint8), torch.ones(1, 1)),
         "0..15"),
        (lambda: QuantizedRows(WeightLayout("int4", 32), torch.zeros(1, 32), torch.ones(1, 1)), "torch.uint8"),
        (lambda: QuantizedRows(WeightLayout("int4", 32), torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1),
         paired_k=32), "(1, 32) for K = 32"),
        (lambda: QuantizedRows(WeightLayout("int8", 32), torch.zeros(1, 16, dtype=torch.int8), torch.ones(1, 1),
         paired_k=32), "only int4"),
        (lambda: QuantizedRows(WeightLayout("int8", 32), torch.zeros(2, 40, dtype=torch.int8), torch.ones(2, 1)),
         "(2, 2)"),
        (lambda: QuantizedRows(WeightLayout("int8", 32), torch.zeros(1, 32, dtype=torch.int8), torch.ones(1, 1),
         torch.ones(1, 1)), "no mins"),
        (lambda: QuantizedRows(WeightLayout("int8", 32), torch.zeros(1, 32, dtype=torch.int8), torch.ones(1, 1),
         order=torch.zeros(31, dtype=torch.int64)), "int64 (32,)"),
    ],
)  # fmt: skip
def test_refused(make, told):
    with pytest.raises(ValueError) as caught:
        make()
    assert told in str(caught.value)
