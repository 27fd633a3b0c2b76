"""Fields of a few bits out of packed bytes, beside their definition in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pace import _C
from pace.ops.kernels.quantize import add_fields_, unpack_fields


def definition(packed: Tensor, run: int, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    parts = packed.reshape(packed.shape[0], packed.shape[1] // run, 1, run) >> shifts
    return parts.bitwise_and_((1 << bits) - 1).flatten(1)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("blocks, num_bytes, run", [(0, 4, 4), (1, 4, 1), (7, 32, 32), (3, 96, 32), (5000, 128, 64)])
def test_fields_are_those_of_the_definition(bits, blocks, num_bytes, run):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (blocks, num_bytes + 5), dtype=torch.uint8, generator=generator)
    packed = rows[:, 3 : 3 + num_bytes]
    want = definition(packed, run, bits)
    assert torch.equal(unpack_fields(packed, run, bits), want)
    codes = torch.randint(0, 256, want.shape, dtype=torch.uint8, generator=generator)
    expected = codes | want << (8 - bits)
    add_fields_(codes, packed, run, bits, 8 - bits)
    assert torch.equal(codes, expected)


def test_what_cannot_be_unpacked_is_refused():
    packed = torch.zeros(2, 8, dtype=torch.uint8)
    for run, bits in ((3, 4), (8, 3), (0, 1)):
        with pytest.raises(ValueError, match="fields have 1, 2 or 4 bits, in whole runs of bytes"):
            unpack_fields(packed, run, bits) if bits != 3 else _C.unpack_fields(0, 8, 2, 8, run, bits, 0, 0, False)
    with pytest.raises(ValueError, match="end within a byte"):
        add_fields_(torch.zeros(2, 16, dtype=torch.uint8), packed, 8, 4, 5)
    with pytest.raises(
        ValueError, match=r"codes must be contiguous uint8 \(2, 16\); got torch.uint8 of shape \(2, 8\)"
    ):
        add_fields_(torch.zeros(2, 8, dtype=torch.uint8), packed, 8, 4, 4)
    for wrong in (packed.t(), packed.int(), packed[0]):
        with pytest.raises(ValueError, match=r"packed must be uint8 \[blocks, bytes\]"):
            unpack_fields(wrong, 8, 4)
