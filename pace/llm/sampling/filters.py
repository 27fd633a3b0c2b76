"""Sampling filters for beam search, which draws from the remaining tokens in its own way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.llm.configs import SamplingConfig

Filter = Callable[[Any, Tensor], None]
"""Function of (ops, logits [V]) that sets filtered-out logits to -inf, in place."""


def build_filters(config: SamplingConfig, num_spared: int = 1) -> list[Filter]:
    """Returns filters for temperature, top_k and top_p, min_p, typical_p, in this order, if `config` asks for them;
    none for greedy. Each leaves at least `num_spared` tokens: beam search needs one more than there are end tokens."""
    filters: list[Filter] = []
    if not config.do_sample:
        return filters
    if config.temperature != 1.0:
        filters.append(divide_by_temperature(config.temperature))
    if config.top_k or config.top_p < 1.0:
        top_k = torch.tensor([config.top_k and max(config.top_k, num_spared)], dtype=torch.int64)
        top_p = torch.tensor([config.top_p], dtype=torch.float32)
        filters.append(sparing(num_spared, lambda ops, logits: ops.top_k_top_p_(logits[None], top_k, top_p)))
    if config.min_p:
        filters.append(sparing(num_spared, lambda ops, logits: keep_min_p_(ops, logits, config.min_p)))
    if config.typical_p < 1.0:
        filters.append(lambda ops, logits: keep_typical_(ops, logits, config.typical_p, num_spared))
    return filters


def sparing(count: int, filter_: Filter) -> Filter:
    """Wraps the filter so that the `count` largest logits stay. (A filter by itself leaves the largest.)"""
    if count == 1:
        return filter_

    def spare_(ops: Any, logits: Tensor) -> None:
        numbers = logits.numpy()
        spared = largest(numbers, count)
        values = numbers[spared]
        filter_(ops, logits)
        numbers[spared] = values

    return spare_


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


def divide_by_temperature(temperature: float) -> Filter:
    def divide_(ops: Any, logits: Tensor) -> None:
        numbers = logits.numpy()
        numbers /= np.float32(temperature)

    return divide_


def keep_min_p_(ops: Any, logits: Tensor, min_p: float) -> None:
    """Filters tokens less than `min_p` times as likely as the most likely one."""
    probabilities = ops.softmax(logits[None])[0].numpy()
    top = probabilities.argmax()
    outside = probabilities < np.float32(min_p) * probabilities[top]
    outside[top] = False
    logits.numpy()[outside] = -math.inf


def keep_typical_(ops: Any, logits: Tensor, mass: float, num_spared: int = 1) -> None:
    """Keeps the tokens whose information is closest to the entropy, up to `mass` of the probability (arXiv:2202.00666),
    and at least `num_spared`."""
    log_probabilities = ops.log_softmax(logits[None])[0]
    probabilities = log_probabilities.exp()
    entropy = -(log_probabilities * probabilities).nansum()
    distance, order = (-log_probabilities - entropy).abs().sort()
    cumulative = probabilities[order].cumsum(0)
    last = min(int((cumulative < mass).sum()), logits.shape[0] - 1)
    outside = distance > distance[last]
    outside[:num_spared] = False
    logits[order[outside]] = -math.inf
