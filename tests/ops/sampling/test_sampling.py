"""Argmax of rows of logits, against torch."""

from __future__ import annotations

import math

import pytest
import torch

from pace.ops import native
from tests.ops.isas import FLOATS, each_isa, on_each_isa

VOCABULARIES = [1, 2, 15, 16, 17, 63, 100, 1000, 5000]


def random_logits(rows: int, n: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))


@on_each_isa
def test_argmax_is_the_lowest_index_of_the_largest():
    for n in VOCABULARIES:
        logits = random_logits(8, n).round()  # many ties
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert native.argmax(logits).tolist() == expected
        assert native.argmax(torch.full((1, n), -math.inf)).tolist() == [-1]
        for place in {0, n // 2, n - 1}:
            spiked = logits.clone()
            spiked[:, place] = torch.finfo(torch.float32).max
            assert native.argmax(spiked).tolist() == [place] * 8
            spiked[3, place], spiked[5, place] = math.nan, math.inf
            assert native.argmax(spiked).tolist() == [place] * 3 + [-1, place, -1] + [place] * 2


def test_a_large_vocabulary_and_strided_rows():
    wide = random_logits(2, 152_100, seed=11)
    logits = wide[:, 40:152_040]
    for isa in each_isa([isa for isa in FLOATS if "emulated" not in isa]):  # emulated tables are slow
        assert native.argmax(logits).tolist() == logits.argmax(-1).tolist(), isa


def test_wrong_arguments_are_refused():
    for message, logits in [
        ("logits", random_logits(3, 10).double()),
        ("logits", random_logits(3, 10)[0]),
        ("words", torch.empty(2, 0)),
    ]:
        with pytest.raises(ValueError, match=message):
            native.argmax(logits)
