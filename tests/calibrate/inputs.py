"""Calibration data of the tests."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from pace.calibrate import quantize
from pace.eval import read_texts

HELDOUT = Path(__file__).parents[1] / "data" / "tiny_heldout.jsonl"
quantize_checkpoint = functools.partial(quantize.quantize_checkpoint, progress=False, report=False)


@functools.cache
def texts(first: int, count: int) -> tuple[str, ...]:
    """Texts of the held-out file. Use different texts to calibrate and to evaluate."""
    return tuple(read_texts(HELDOUT)[first : first + count])


def tokens(count: int, length: int, seed: int = 0, vocab_size: int = 99) -> list[list[int]]:
    drawn = torch.randint(2, 99, (count, length), generator=torch.Generator().manual_seed(seed))
    return (drawn % vocab_size).tolist()
