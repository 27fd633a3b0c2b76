"""Log-probabilities and sampling filters of beam search, which draws several tokens of a row without replacement. In
numpy and plain torch: it is rare, and the kernels draw one token."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pace.llm.configs import SamplingConfig
from pace.ops.reference_parts.sampling import keep_typical_, top_k_top_p_

Filter = Callable[[Tensor], None]
"""Function that divides logits `[V]` by the temperature and sets those that are filtered out to -inf, in place."""


def log_softmax(logits: Tensor) -> np.ndarray:
    """Returns the log-probabilities of a row of logits `[V]`, fp32, summed in fp64."""
    shifted = logits.numpy() - logits.numpy().max()
    return shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))


def make_filter(config: SamplingConfig, num_spared: int = 1) -> Filter | None:
    """Returns a filter of temperature, top_k and top_p, min_p, typical_p, in this order; None for greedy. It leaves at
    least `num_spared` tokens: beam search needs one more than there are end tokens."""
    if not config.do_sample:
        return None
    top_k = torch.tensor([config.top_k and max(config.top_k, num_spared)])
    top_p = torch.tensor([config.top_p], dtype=torch.float32)

    def filter_(logits: Tensor) -> None:
        logits /= config.temperature
        spared = torch.from_numpy(largest(logits.numpy(), num_spared))
        values = logits[spared]
        if config.top_k or config.top_p < 1.0:
            top_k_top_p_(logits[None], top_k, top_p)
            logits[spared] = values
        if config.min_p:
            probabilities = logits.softmax(0)
            logits[probabilities < config.min_p * probabilities.max()] = -math.inf
            logits[spared] = values
        if config.typical_p < 1.0:
            keep_typical_(logits, config.typical_p, num_spared)

    return filter_


_PIECE = 64
"""Length of the pieces whose maxima give a bound for the largest numbers. For 152k numbers this takes 0.1 ms; sorting
takes 10 ms."""


def largest(numbers: np.ndarray, count: int) -> np.ndarray:
    """Returns int64 indices of the `count` largest of `numbers [V]`, largest first, ties by lower index. Returns fewer
    if fewer are above -inf. `numbers` must hold no NaN."""
    num_pieces = len(numbers) // _PIECE
    candidates = np.arange(len(numbers))
    if num_pieces > count:
        maxima = numbers[: num_pieces * _PIECE].reshape(_PIECE, num_pieces).max(axis=0)
        candidates = np.flatnonzero(
            numbers >= np.partition(maxima, -count)[-count]
        )  # at least `count`: one in each of the best pieces
    candidates = candidates[numbers[candidates] > -math.inf]
    return candidates[np.argsort(-numbers[candidates], kind="stable")[:count]]
