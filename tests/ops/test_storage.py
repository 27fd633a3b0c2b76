"""Codes and scales: what they mean, what is refused, and the storage that serves several at once."""

import itertools
from dataclasses import replace

import pytest
import torch

from pace.ops.storage import CODEBOOKS, QuantizedRows, Storage, common_storage


def random_rows(storage: Storage, rows: int = 5, k: int = 80, order: bool = False) -> QuantizedRows:
    groups = storage.num_groups(k)
    codes = {
        "int8": torch.randint(-128, 128, (rows, k), dtype=torch.int8),
        "int4": torch.randint(0, 16, (rows, k), dtype=torch.uint8),
        "float8": torch.randn(rows, k).to(torch.float8_e4m3fn).view(torch.uint8),
    }[storage.code]
    mins = torch.randn(rows, groups) if storage.has_mins else None
    return QuantizedRows(storage, codes, torch.rand(rows, groups) + 0.1, mins, torch.randperm(k) if order else None)


STORAGES = [
    Storage(code, group, has_mins, codebook)
    for code, group, has_mins, codebook in itertools.product(
        ("int8", "int4", "float8"), (None, 16, 32, 48), (False, True), (None, *CODEBOOKS)
    )
    if not (codebook and (code != "int4" or has_mins)) and not (has_mins and (code == "float8" or group is None))
]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("order", [False, True])
def test_dequantize_is_the_definition(storage, order):
    rows = random_rows(storage, order=order)
    values, k = rows.dequantize(), rows.shape[1]
    for row, column in [(0, 0), (1, 15), (2, 16), (3, 47), (4, 79), (0, 78)]:
        code = rows.codes[row, column]
        level = (
            code.view(torch.float8_e4m3fn).item() if storage.code == "float8"
            else CODEBOOKS[storage.codebook][code] if storage.codebook
            else float(code) - (8 if storage.code == "int4" else 0)
        )  # fmt: skip
        group = column // (storage.group or k)
        expected = torch.tensor(level) * rows.scales[row, group] + (rows.mins[row, group] if storage.has_mins else 0)
        assert values[row, rows.order[column] if order else column] == expected


@pytest.mark.parametrize("first, second", [*itertools.combinations(STORAGES, 2)], ids=str)
def test_common_storage_keeps_values(first, second):
    common = common_storage([first, second])
    if common is None:
        assert "float8" in (first.code, second.code) or (
            first.codebook != second.codebook and {first.codebook, second.codebook} & {"nf4", "fp4"}
        )
        return
    for storage in (first, second):
        rows = random_rows(storage)
        assert torch.equal(rows.as_storage(common).dequantize(), rows.dequantize())
        if storage.code == "int4":
            pairs = replace(rows, codes=rows.codes[:, ::2] | rows.codes[:, 1::2] << 4, paired_k=rows.shape[1])
            assert torch.equal(pairs.as_storage(common).dequantize(), rows.dequantize())


def test_common_storage_is_no_larger_than_needed():
    assert common_storage([Storage("int4", 32), Storage("int4", 32)]) == Storage("int4", 32)
    assert common_storage([Storage("int4", 32), Storage("int4", 64, has_mins=True)]) == Storage(
        "int4", 32, has_mins=True
    )
    assert common_storage([Storage("int4", 32, has_mins=True), Storage("int8", 16)]) == Storage(
        "int8", 16, has_mins=True
    )
    assert common_storage([Storage("int8", None), Storage("int8", 32)]) == Storage("int8", 32)
    assert common_storage([Storage("int4", 32, codebook="iq4_nl"), Storage("int4", 64, codebook="iq4_nl")]) == Storage(
        "int4", 32, codebook="iq4_nl"
    )
    assert common_storage([Storage("int4", 32, codebook="iq4_nl"), Storage("int8", 32, has_mins=True)]) == Storage(
        "int8", 32, has_mins=True
    )
    assert common_storage([Storage("int4", 32, codebook="mxfp4"), Storage("int4", 32, codebook="iq4_nl")]) == Storage(
        "int8", 32
    )
    assert common_storage([Storage("int4", 32, codebook="nf4"), Storage("int4", 32)]) is None
    assert common_storage([Storage("float8", 128), Storage("int8", None)]) is None


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: Storage("int5", 32), "int8, int4, float8"),
        (lambda: Storage("int4", 24), "multiple of 16"),
        (lambda: Storage("int4", 0), "multiple of 16"),
        (lambda: Storage("int8", 32, codebook="nf4"), "codebook"),
        (lambda: Storage("int4", 32, codebook="nf5"), "nf4"),
        (lambda: Storage("int8", None, has_mins=True), "minima"),
        (lambda: QuantizedRows(Storage("int4", 32), torch.full((1, 32), 16, dtype=torch.uint8), torch.ones(1, 1)), "0..15"),
        (lambda: QuantizedRows(Storage("int4", 32), torch.zeros(1, 32), torch.ones(1, 1)), "torch.uint8"),
        (lambda: QuantizedRows(Storage("int4", 32), torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1), paired_k=32), "(1, 32) for K = 32"),
        (lambda: QuantizedRows(Storage("int8", 32), torch.zeros(1, 16, dtype=torch.int8), torch.ones(1, 1), paired_k=32), "int4 alone"),
        (lambda: QuantizedRows(Storage("int8", 32), torch.zeros(2, 40, dtype=torch.int8), torch.ones(2, 1)), "(2, 2)"),
        (lambda: QuantizedRows(Storage("int8", 32), torch.zeros(1, 32, dtype=torch.int8), torch.ones(1, 1), torch.ones(1, 1)), "without minima"),
        (lambda: QuantizedRows(Storage("int8", 32), torch.zeros(1, 32, dtype=torch.int8), torch.ones(1, 1), order=torch.zeros(31, dtype=torch.int64)), "int64 (32,)"),
    ],
)  # fmt: skip
def test_refused(make, told):
    with pytest.raises(ValueError) as caught:
        make()
    assert told in str(caught.value)
