"""Adapters of products: native against the specification, and rows independent of each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pace import _C
from pace.ops import native, reference
from pace.ops.adapters import AdapterMatrices, AdapterPart, AdapterTable
from pace.quant import read_format
from tests.ops.isas import on_each_isa

COLUMNS = (40, 9, 16)
"""Parts of a product. One does not fill its panels, and one begins inside a panel."""
MAX_RANK = 24
RANKS = [(5, 5, 5), (None, 8, None), (24, 1, 17), (16, None, 16)]
"""For each adapter, the rank of each part; None for a part without matrices."""
EPS = torch.finfo(torch.float32).eps


def table_of(ops, k, dtype=torch.float32, num_slots=6, seed=0):
    """A table whose slot 1 is empty; other slots have the adapters of RANKS, in order."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
    table = AdapterTable(k, COLUMNS, num_slots, MAX_RANK, dtype)
    for slot, ranks in zip((0, 2, 3, 5), RANKS):
        present = [(columns, rank) for columns, rank in zip(COLUMNS, ranks) if rank]
        rows = [draw(sum(rank for _, rank in present), k), *(draw(columns, rank) for columns, rank in present)]
        a, *bs = ops.pack_matrices(rows, dtype)
        parts, bs = [], iter(bs)
        for part, (columns, rank) in enumerate(zip(COLUMNS, ranks)):
            bias = draw(columns) if part == 1 else None
            parts.append(AdapterPart(next(bs), bias, 0.5 + part) if rank else None)
        table.put(slot, AdapterMatrices(a, tuple(parts)))
    return table


def routing_of(*rows):
    """`[T, 4]`: (slot, weight) of up to two adapters of each row."""
    found = torch.full((len(rows), 4), -1.0)
    for row, pairs in enumerate(rows):
        for place, (slot, weight) in enumerate(pairs):
            found[row, place], found[row, 2 + place] = slot, weight
    return found


SOME = [[(0, 1.0)], [], [(3, 0.5), (0, -2.0)], [(5, 1.0)], [(1, 1.0)], [(2, 3.0)], [(0, 1.0)]]


def cases(count):
    return routing_of(*(SOME[row % len(SOME)] for row in range(count)))


def inputs(count, k, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, k, generator=generator), torch.randn(count, sum(COLUMNS), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_each_isa
def test_sums_are_those_of_the_specification(dtype):
    """An element is a chain of K, then of r multiply-adds. With inputs rounded to bf16, each of the two products has
    their error, 2^-8, once more."""
    k = 70
    ours, exact = table_of(native, k, dtype), table_of(reference, k, dtype)
    sizes = absolute(exact)
    rounding = 2**-8 if dtype == torch.bfloat16 and _C.isa().endswith(("bf16", "amx")) else 0.0
    for count in (1, 2, 5, 7, 33, 300):
        x, y = inputs(count, k)
        expected = y.double()
        bound = y.abs().double()  # sum |w s| (|B| |A| |x| + |bias|)
        magnitudes = cases(count)
        magnitudes[:, 2:] = magnitudes[:, 2:].abs()
        reference.add_adapters_(bound, x.abs().double(), sizes, magnitudes)
        native.add_adapters_(y, x, ours, cases(count))
        reference.add_adapters_(expected, x.double(), exact, cases(count))
        error = ((k + MAX_RANK + 4) * EPS + 2.01 * rounding) * bound
        assert ((y.double() - expected).abs() <= error).all(), count


def absolute(table):
    """The table of absolute values."""
    positive = table.converted(lambda weight: reference.DenseWeight(weight.matrix.abs().double()))
    for slot, matrices in enumerate(positive.slots):
        if matrices:
            parts = [part and replace(part, bias=part.bias if part.bias is None else part.bias.abs())
                     for part in matrices.parts]  # fmt: skip
            positive.put(slot, AdapterMatrices(matrices.a, tuple(parts)))
    return positive


@pytest.mark.parametrize("threads", [1, 2, 5])
@on_each_isa
def test_a_row_has_the_bits_of_its_own(threads):
    k = 70
    table, x = table_of(native, k, torch.bfloat16), inputs(300, k)[0]
    _C.set_num_threads(threads)
    alone = []
    for row in range(len(SOME)):
        y = inputs(300, k)[1][row : row + 1].clone()
        native.add_adapters_(y, x[row : row + 1], table, cases(300)[row : row + 1])
        alone.append(y[0])
    for count in (2, 4, 7, 17, 300):
        y = inputs(300, k)[1][:count].clone()
        before = y.clone()
        native.add_adapters_(y, x[:count], table, cases(count))
        for row in range(min(count, len(SOME))):
            assert torch.equal(y[row], alone[row]), (count, row)
        untouched = torch.tensor([SOME[row % len(SOME)] in ([], [(1, 1.0)]) for row in range(count)])
        assert torch.equal(y[untouched], before[untouched]), count


@on_each_isa
def test_parts_without_matrices_keep_their_columns():
    table, (x, y) = table_of(native, 70), inputs(5, 70)
    before = y.clone()
    native.add_adapters_(y, x, table, routing_of(*[[(2, 1.0)]] * 5))
    assert torch.equal(y[:, :40], before[:, :40]) and torch.equal(y[:, 49:], before[:, 49:])
    assert (y[:, 40:49] != before[:, 40:49]).all()


def test_rows_may_have_any_stride_and_other_memory_is_left_alone():
    table, (x, y) = table_of(native, 70), inputs(9, 70)
    wide_x, wide_y = torch.full((9, 80), torch.nan), torch.full((9, 90), 7.0)
    wide_x[:, 3:73], wide_y[:, 5:70] = x, y
    native.add_adapters_(y, x, table, cases(9))
    native.add_adapters_(wide_y[:, 5:70], wide_x[:, 3:73], table, cases(9))
    assert torch.equal(wide_y[:, 5:70], y)
    assert (wide_y[:, :5] == 7).all() and (wide_y[:, 70:] == 7).all()


def test_a_slot_can_be_filled_anew_and_emptied():
    table, (x, y) = table_of(native, 70), inputs(3, 70)
    before, routing = y.clone(), routing_of(*[[(0, 1.0)]] * 3)
    table.put(0, table.slots[3])
    native.add_adapters_(y, x, table, routing)
    expected = before.clone()
    native.add_adapters_(expected, x, table, routing_of(*[[(3, 1.0)]] * 3))
    assert torch.equal(y, expected)
    table.clear(0)
    y = before.clone()
    native.add_adapters_(y, x, table, routing)
    assert torch.equal(y, before)


def test_numbers_that_are_no_slot_add_nothing():
    table, (x, y) = table_of(native, 70), inputs(4, 70)
    before, routing = y.clone(), cases(4)
    routing[:, :2] = torch.tensor([[-1, 6], [torch.nan, 1e9], [torch.inf, -torch.inf], [4, 1]])
    native.add_adapters_(y, x, table, routing)
    assert torch.equal(y, before)


def test_adapters_of_another_product_are_refused():
    table, (x, y) = table_of(native, 70), inputs(4, 70)
    for wrong in ((y[:, :-1], x, cases(4)), (y, x[:, :-1], cases(4)), (y, x, cases(3)), (y, x, cases(4)[:, :3])):
        with pytest.raises(ValueError):
            native.add_adapters_(wrong[0], wrong[1], table, wrong[2])
    a, *_ = native.pack_matrices([torch.ones(3, 70)], torch.float32)
    for parts in ((), (None, None), (None, None, AdapterPart(a, None, 1.0))):
        with pytest.raises(ValueError):
            table.put(0, AdapterMatrices(a, parts))


@on_each_isa
def test_adapters_loaded_for_another_layout_are_refused():
    if _C.isa() == "generic":
        return
    table, (x, y) = table_of(native, 70, torch.bfloat16), inputs(4, 70)
    others = [name for name in _C.available_isas() if bf16_layout(name) != bf16_layout(_C.isa())]
    for other in others[:1]:
        _C.select_isa(other)
        with pytest.raises(ValueError, match="another instruction set"):
            native.add_adapters_(y, x, table, cases(4))


def bf16_layout(isa):
    return 2 if isa.endswith(("bf16", "amx")) else 1 if "avx512" in isa else 0


# -- gate and up apart


@pytest.mark.parametrize("layout", [torch.float32, torch.bfloat16, "int8", "int4"])
@on_each_isa
def test_gate_and_up_apart_then_glu_have_the_bits_of_linear_glu(layout):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * 52, 70, generator=generator)
    format = None if isinstance(layout, torch.dtype) else read_format(layout).for_width(70)
    weight = native.empty_weight(104, 70, layout if format is None else format.layout, glu=True)
    if format is None:
        native.pack_rows_(weight, rows, 0)
    else:
        native.pack_quantized_(weight, native.quantize(rows, format), 0)
    bias = torch.randn(104, generator=generator)
    for count in (1, 3, 40):
        x = torch.randn(count, 70, generator=generator)
        for activation in ("silu", "gelu", "gelu_tanh", "relu2"):
            apart = native.linear(x, weight, bias)
            assert apart.shape == (count, 104)
            assert torch.equal(native.glu(apart, activation), native.linear_glu(x, weight, activation, bias))
        assert torch.equal(native.linear(x, weight, None, None, apart), native.linear(x, weight) + apart)


@pytest.mark.parametrize("activation", ["silu", "gelu", "quick_gelu"])
@on_each_isa
def test_glu_is_that_of_the_specification(activation):
    x = 3 * torch.randn(5, 2 * 37, generator=torch.Generator().manual_seed(0))
    x[0, 3] = torch.nan
    ours, exact = native.glu(x, activation), reference.glu(x.double(), activation)
    assert ours[0, 3].isnan()
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=1e-6, equal_nan=True)
    wide = torch.full((5, 90), torch.nan)
    wide[:, 2:76] = x
    assert torch.equal(native.glu(wide[:, 2:76], activation).nan_to_num(9), ours.nan_to_num(9))
