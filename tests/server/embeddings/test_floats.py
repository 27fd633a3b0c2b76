"""float32 values as JSON numbers: as few digits as float32 needs, and the same value when read."""

from __future__ import annotations

import base64
import json
import struct

import numpy as np
import torch

from pace.server.embeddings.floats import as_base64, shortest


def values(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    usual = torch.nn.functional.normalize(torch.randn(count // 8, 8, generator=generator))
    any_bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    odd = torch.tensor([0.0, -0.0, 1.0, 0.1, 1e-45, 3.4e38, -1e-20, 123456789.0, 1e9, 2.0**24 + 2, 0.3, 1e-13, 5e-14])
    found = torch.cat([usual.flatten(), any_bits.view(torch.float32), odd])
    return found[torch.isfinite(found)]


def test_numbers_read_as_the_same_float32():
    given = values(4000)
    read = torch.tensor(json.loads(json.dumps(shortest(given).tolist())), dtype=torch.float64).float()
    assert torch.equal(read.view(torch.int32), given.view(torch.int32))


def test_numbers_have_the_digits_of_numpys_float32():
    """numpy finds the shortest number in another way."""
    given = values(4000)
    given = given[(given.abs() > 1e-13) & (given.abs() < 1e6)]
    expected = [float(str(value)) for value in given.numpy()]
    assert shortest(given).tolist() == expected


def test_base64_has_little_endian_floats():
    row = values(64)[:5]
    assert struct.unpack("<5f", base64.b64decode(as_base64(row))) == tuple(np.float32(row).tolist())
