"""Token masks, which set logits to minus infinity, against a loop over the bits."""

from __future__ import annotations

import math

import pytest
import torch

from pace import _C
from pace.ops import native, reference
from tests.ops.isas import FLOATS, on_each_isa

VOCABULARIES = [1, 7, 31, 32, 33, 63, 64, 65, 100, 1000, 32768, 32769, 70_001]


def random_mask(rows: int, n: int, seed: int) -> torch.Tensor:
    """Mask with words of zeros, of ones, and random ones, including random bits beyond n."""
    chance = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (rows, -(-n // 32)), generator=chance, dtype=torch.int64).to(torch.int32)
    kind = torch.randint(0, 4, words.shape, generator=chance)
    return words.where(kind > 1, -kind.to(torch.int32))


def expected(logits: torch.Tensor, mask: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Masked logits by the definition, one bit after another."""
    result = logits.tolist()
    for words, row in zip(mask.tolist(), rows):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> token % 32 & 1:
                result[row][token] = -math.inf
    return torch.tensor(result)


@pytest.mark.parametrize("n", VOCABULARIES)
def test_what_has_no_bit_is_banned(n: int) -> None:
    logits = torch.randn(4, n, generator=torch.Generator().manual_seed(n))
    masks = [random_mask(4, n, seed) for seed in range(3)]
    wanted = [(expected(logits, mask, [0, 1, 2, 3]), expected(logits, mask[:2], [3, 1])) for mask in masks]
    isas = [isa for isa in FLOATS if n <= 1000 or "emulated" not in isa]  # emulated tables are slow
    for ops, isa in [(reference, isas[0]), *((native, isa) for isa in isas)]:
        _C.select_isa(isa)
        for mask, (whole, two) in zip(masks, wanted):
            got = logits.clone()
            ops.apply_mask_(got, mask)
            assert torch.equal(got, whole), (ops, isa)
            got = logits.clone()
            ops.apply_mask_(got, mask[:2], torch.tensor([3, 1]))
            assert torch.equal(got, two), (ops, isa)
            assert torch.equal(got[[0, 2]], logits[[0, 2]]), (ops, isa)
        got = logits.clone()
        ops.apply_mask_(got, masks[0][:0], torch.tensor([], dtype=torch.int64))
        assert torch.equal(got, logits), (ops, isa)


@on_each_isa
def test_rows_and_masks_may_be_strided() -> None:
    wide, words = torch.randn(3, 90), random_mask(3, 320, 1)
    view, mask = wide[:, 7:72], words[:, 2:5]
    wanted = expected(view, mask, [0, 1, 2])
    before = wide.clone()
    native.apply_mask_(view, mask)
    assert torch.equal(view, wanted)
    assert torch.equal(wide[:, :7], before[:, :7]) and torch.equal(wide[:, 72:], before[:, 72:])


@on_each_isa
def test_nan_and_infinity_stay_where_they_are_allowed() -> None:
    logits = torch.tensor([[math.nan, math.inf, -math.inf, 1.0, math.nan, math.inf]])
    native.apply_mask_(logits, torch.tensor([[0b001111]], dtype=torch.int32))
    assert torch.equal(
        logits.nan_to_num(nan=7.0),
        torch.tensor([[math.nan, math.inf, -math.inf, 1.0, -math.inf, -math.inf]]).nan_to_num(nan=7.0),
    )
    assert math.isnan(logits[0, 0]) and logits[0, 1] == math.inf and (logits[0, [2, 4, 5]] == -math.inf).all()


def test_wrong_arguments_are_refused() -> None:
    logits, mask = torch.randn(3, 40), random_mask(3, 40, 0)
    index = torch.tensor
    for message, call in [
        ("mask must be int32", lambda: native.apply_mask_(logits, mask.long())),
        ("mask must be int32", lambda: native.apply_mask_(logits, mask[:2])),
        ("mask must be int32", lambda: native.apply_mask_(logits, mask[:, :1])),
        ("mask must be int32", lambda: native.apply_mask_(logits, mask.t().contiguous().t())),
        ("logits must be", lambda: native.apply_mask_(logits.double(), mask)),
        ("rows must be", lambda: native.apply_mask_(logits, mask, index([0, 1, 2], dtype=torch.int32))),
        ("different rows of the 3", lambda: native.apply_mask_(logits, mask, index([0, 1, 3]))),
        ("different rows of the 3", lambda: native.apply_mask_(logits, mask, index([-1, 1, 2]))),
        ("different rows of the 3", lambda: native.apply_mask_(logits, mask, index([1, 1, 2]))),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
