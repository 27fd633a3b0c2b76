"""Rotary embedding against its twin, on strided views, both forms, whole and partial."""

from __future__ import annotations

import pytest
import torch

from pace import _C
from pace.ops import native, reference
from tests.support import isas_of_floats


@pytest.fixture(params=isas_of_floats(), autouse=True)
def isa(request):
    before = _C.isa()
    _C.select_isa(request.param)
    yield
    _C.select_isa(before)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "half"),
    [(1, 1, 2, 1), (5, 3, 40, 10), (70, 4, 64, 32), (2, 2, 80, 16), (3, 1, 38, 19)],
)
def test_equals_its_twin(interleaved, tokens, heads, head_dim, half):
    fused = torch.randn(tokens, heads + 2, head_dim)
    angle = torch.randn(tokens, half)
    got, expected = fused.clone(), fused.clone()
    native.rotary_(got[:, 1 : heads + 1], angle.cos(), angle.sin(), interleaved)
    reference.rotary_(expected[:, 1 : heads + 1], angle.cos(), angle.sin(), interleaved)
    assert torch.equal(got, expected)  # the neighbours of the view too


def test_wrong_arguments_are_refused():
    x, table = torch.randn(4, 2, 16), torch.randn(4, 8)
    for message, call in [
        ("rotate 18", lambda: native.rotary_(x, torch.randn(4, 9), torch.randn(4, 9), False)),
        ("cos", lambda: native.rotary_(x, table[:3], table, False)),
        ("sin", lambda: native.rotary_(x, table, table[:, :4], False)),
        ("cos", lambda: native.rotary_(x, table.double(), table, False)),
        ("contiguous D", lambda: native.rotary_(x.transpose(1, 2), table, table, False)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
