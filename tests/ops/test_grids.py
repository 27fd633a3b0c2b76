"""Products with points of grids: the same bits on every instruction set, for any rows and threads, and in parts."""

from __future__ import annotations

import pytest
import torch

from pace import _C
from pace.checkpoints.gguf.blocks import BLOCK_TYPES
from pace.ops import native
from pace.ops.blocks import BlockRows, BlockType
from pace.ops.weight_layout import GRIDS, MixedLayout
from tests.ops.isas import ALL, each_isa

TYPES = [kind for kind in BLOCK_TYPES.values() if kind.layout.code in GRIDS]


def random_rows(kind: BlockType, n: int, k: int) -> BlockRows:
    """Blocks of random bytes with small scales."""
    data = torch.randint(0, 256, (n, k // kind.weights, kind.nbytes), dtype=torch.uint8)
    if kind.name == "IQ1_M":
        data[..., -1] &= 0x2F  # the high bits of its scale
    else:
        data[..., 1] &= 0xA7
    return BlockRows(kind, data.flatten(1))


def packed(rows: BlockRows) -> native.PackedWeight:
    weight = native.empty_weight(*rows.shape, rows.layout)
    native.pack_quantized_(weight, rows, 0)
    return weight


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_rows_are_the_same_alone_in_batches_and_on_every_instruction_set(kind):
    rows, x = random_rows(kind, 70, 768), torch.randn(21, 768)
    weight, exact = packed(rows), x.double() @ rows.dequantize().double().T
    first = None
    for isa in each_isa(ALL):
        whole = native.linear(x, weight)
        first = whole if first is None else first
        assert torch.equal(whole, first), isa
        for count in (1, 3, 4, 9):
            assert torch.equal(native.linear(x[5 : 5 + count], weight), whole[5 : 5 + count]), (isa, count)
    # Inputs are rounded to 127ths of the largest of 128, about 2.8 times their spread.
    assert (first - exact).norm() < 1.5 * 2.8 / 127 / 12**0.5 * exact.norm()


def test_parts_of_several_grids_give_what_they_give_alone():
    """A weight of three parts gives what each gives alone, on any number of threads."""
    parts = [random_rows(kind, 16 * (1 + number), 512) for number, kind in enumerate(TYPES[:3])]
    layout = MixedLayout(tuple((rows.shape[0], rows.layout) for rows in parts))
    weight, row = native.empty_weight(96, 512, layout), 0
    for rows in parts:
        native.pack_quantized_(weight, rows, row)
        row += rows.shape[0]
    for count in (1, 5, 40):
        x = torch.randn(count, 512)
        expected = torch.cat([native.linear(x, packed(rows)) for rows in parts], dim=1)
        for threads in (1, 3):
            _C.set_num_threads(threads)
            assert torch.equal(native.linear(x, weight), expected), (count, threads)
