"""Codes and scales: what they mean, what is refused, and the layout that serves several at once."""

import itertools
from dataclasses import replace

import pytest
import torch

from pace.ops.weight_layout import CODEBOOKS, QuantizedRows, WeightLayout, common_layout


def random_rows(layout: WeightLayout, rows: int = 5, k: int = 80, order: bool = False) -> QuantizedRows:
    groups = layout.num_groups(k)
    codes = {
        "int8": torch.randint(-128, 128, (rows, k), dtype=torch.int8),
        "int4": torch.randint(0, 16, (rows, k), dtype=torch.uint8),
        "float8": torch.randn(rows, k).to(torch.float8_e4m3fn).view(torch.uint8),
    }[layout.code]
    mins = torch.randn(rows, groups) if layout.has_mins else None
    return QuantizedRows(layout, codes, torch.rand(rows, groups) + 0.1, mins, torch.randperm(k) if order else None)


LAYOUTS = [
    WeightLayout(code, group, has_mins, codebook)
    for code, group, has_mins, codebook in itertools.product(
        ("int8", "int4", "float8"), (None, 16, 32, 48), (False, True), (None, *CODEBOOKS)
    )
    if not (codebook and (code != "int4" or has_mins)) and not (has_mins and (code == "float8" or group is None))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("order", [False, True])
def test_dequantize_is_the_definition(layout, order):
    rows = random_rows(layout, order=order)
    values, k = rows.dequantize(), rows.shape[1]
    for row, column in [(0, 0), (1, 15), (2, 16), (3, 47), (4, 79), (0, 78)]:
        code = rows.codes[row, column]
        level = (
            code.view(torch.float8_e4m3fn).item() if layout.code == "float8"
            else CODEBOOKS[layout.codebook][code] if layout.codebook
            else float(code) - (8 if layout.code == "int4" else 0)
        )  # fmt: skip
        group = column // (layout.group or k)
        expected = torch.tensor(level) * rows.scales[row, group] + (rows.mins[row, group] if layout.has_mins else 0)
        assert values[row, rows.order[column] if order else column] == expected


@pytest.mark.parametrize("first, second", [*itertools.combinations(LAYOUTS, 2)], ids=str)
def test_common_layout_keeps_values(first, second):
    common = common_layout([first, second])
    if common is None:
        assert "float8" in (first.code, second.code) or (
            first.codebook != second.codebook and {first.codebook, second.codebook} & {"nf4", "fp4"}
        )
        return
    for layout in (first, second):
        rows = random_rows(layout)
        assert torch.equal(rows.as_layout(common).dequantize(), rows.dequantize())
        if layout.code == "int4":
            pairs = replace(rows, codes=rows.codes[:, ::2] | rows.codes[:, 1::2] << 4, paired_k=rows.shape[1])
            assert torch.equal(pairs.as_layout(common).dequantize(), rows.dequantize())


def test_common_layout_is_no_larger_than_needed():
    assert common_layout([WeightLayout("int4", 32), WeightLayout("int4", 32)]) == WeightLayout("int4", 32)
    assert common_layout([WeightLayout("int4", 32), WeightLayout("int4", 64, has_mins=True)]) == WeightLayout(
        "int4", 32, has_mins=True
    )
    assert common_layout([WeightLayout("int4", 32, has_mins=True), WeightLayout("int8", 16)]) == WeightLayout(
        "int8", 16, has_mins=True
    )
    assert common_layout([WeightLayout("int8", None), WeightLayout("int8", 32)]) == WeightLayout("int8", 32)
    assert common_layout(
        [WeightLayout("int4", 32, codebook="iq4_nl"), WeightLayout("int4", 64, codebook="iq4_nl")]
    ) == WeightLayout("int4", 32, codebook="iq4_nl")
    assert common_layout(
        [WeightLayout("int4", 32, codebook="iq4_nl"), WeightLayout("int8", 32, has_mins=True)]
    ) == WeightLayout("int8", 32, has_mins=True)
    assert common_layout(
        [WeightLayout("int4", 32, codebook="mxfp4"), WeightLayout("int4", 32, codebook="iq4_nl")]
    ) == WeightLayout("int8", 32)
    assert common_layout([WeightLayout("int4", 32, codebook="nf4"), WeightLayout("int4", 32)]) is None
    assert common_layout([WeightLayout("float8", 128), WeightLayout("int8", None)]) is None


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: WeightLayout("int5", 32), "int8, int4, float8"),
        (lambda: WeightLayout("int4", 24), "multiple of 16"),
        (lambda: WeightLayout("int4", 0), "multiple of 16"),
        (lambda: WeightLayout("int8", 32, codebook="nf4"), "codebook"),
        (lambda: WeightLayout("int4", 32, codebook="nf5"), "nf4"),
        (lambda: WeightLayout("int8", None, has_mins=True), "minima"),
        (lambda: QuantizedRows(WeightLayout("int4", 32), torch.full((1, 32), 16, dtype=torch.uint8), torch.ones(1, 1)), "0..15"),
        (lambda: QuantizedRows(WeightLayout("int4", 32), torch.zeros(1, 32), torch.ones(1, 1)), "torch.uint8"),
        (lambda: QuantizedRows(WeightLayout("int4", 32), torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1), paired_k=32), "(1, 32) for K = 32"),
        (lambda: QuantizedRows(WeightLayout("int8", 32), torch.zeros(1, 16, dtype=torch.int8), torch.ones(1, 1), paired_k=32), "int4 alone"),
        (lambda: QuantizedRows(WeightLayout("int8", 32), torch.zeros(2, 40, dtype=torch.int8), torch.ones(2, 1)), "(2, 2)"),
        (lambda: QuantizedRows(WeightLayout("int8", 32), torch.zeros(1, 32, dtype=torch.int8), torch.ones(1, 1), torch.ones(1, 1)), "without minima"),
        (lambda: QuantizedRows(WeightLayout("int8", 32), torch.zeros(1, 32, dtype=torch.int8), torch.ones(1, 1), order=torch.zeros(31, dtype=torch.int64)), "int64 (32,)"),
    ],
)  # fmt: skip
def test_refused(make, told):
    with pytest.raises(ValueError) as caught:
        make()
    assert told in str(caught.value)
