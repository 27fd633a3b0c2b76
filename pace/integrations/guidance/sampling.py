"""Picks the next token of a program: guidance's rules on pace's kernels.

The order is guidance's: mask, repetition penalty, temperature, min_p, top_k, top_p. At temperature 0 the likeliest
token after mask and penalty is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.llm.sampling.sampler import draws, uniform
from pace.ops import native as ops
from pace.ops.draws import Edits
from pace.ops.reference_parts.sampling import top_k_top_p_
from pace.ops.rules import Rules

GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy, as in guidance."""


@dataclass(frozen=True)
class Sampling:
    """guidance's `SamplingParams`, and a seed."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Seed of the draws, combined with the position in the text. None: use numpy's global generator, like guidance's
    own models."""

    @classmethod
    def read(cls, params: Mapping[str, Any] | None) -> Sampling:
        """Reads sampling parameters; None means the default. Raises TypeError for an unknown name, ValueError for an
        invalid value."""
        given = {name: value for name, value in (params or {}).items() if value is not None}
        names = [field.name for field in fields(cls)]
        if unknown := given.keys() - set(names):
            raise TypeError(f"sampling_params have no {', '.join(sorted(map(repr, unknown)))}; they have {names}")
        allowed = {
            "top_p": (Real, lambda value: value <= 1, "a number up to 1"),
            "top_k": (Integral, lambda value: True, "an integer"),
            "min_p": (Real, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
            "repetition_penalty": (Real, lambda value: 0 <= value < math.inf, "a number of at least 0"),
            "seed": (Integral, lambda value: value >= 0, "an integer of at least 0"),
        }
        for name, value in given.items():
            kind, is_right, what = allowed[name]
            if isinstance(value, bool) or not isinstance(value, kind) or not is_right(value):
                raise ValueError(f"{name} of sampling_params is {what}; got {value!r}")
        made = cls(**given)
        off = {"top_p": made.top_p < 0, "top_k": made.top_k < 0, "repetition_penalty": made.repetition_penalty <= 0}
        return cls(**{name: value for name, value in given.items() if not off.get(name)})  # negative is off, too


@dataclass(frozen=True)
class Picked:
    """A picked token, and probabilities."""

    token: int
    prob: float
    """Probability of the token without the mask; NaN if not requested."""
    likeliest: list[tuple[int, float]]
    """The likeliest tokens without the mask and their probabilities, in descending order."""


def pick(
    logits: np.ndarray,
    mask: bytes | None,
    seen: list[int],
    temperature: float,
    sampling: Sampling,
    num_likeliest: int | None,
) -> Picked:
    """Picks the token that follows `seen` from its `logits [V]` (float32, not changed).

    `mask` has a byte for each token, 0 for a forbidden one; None allows all. `num_likeliest` is the number of likeliest
    tokens to return with probabilities; None computes no probabilities at all. Raises ValueError if no token is left.
    """
    given = torch.from_numpy(logits)[None]
    free = _shaped(given, None, seen, temperature, sampling) if mask is None or num_likeliest is not None else None
    row = free if mask is None else _shaped(given, mask, seen, temperature, sampling)
    if temperature < GREEDY_BELOW:
        token = int(ops.argmax(row))
    else:
        place = np.random.random_sample() if sampling.seed is None else uniform(int(sampling.seed), len(seen))
        token = int(ops.sample(row, draws([Rules()], [place])).tokens)
    if token < 0:
        raise ValueError(
            "no token is left: the mask, top_k, top_p and min_p together allow none, or the logits are not finite"
        )
    if num_likeliest is None:
        return Picked(token, math.nan, [])
    count = min(num_likeliest, len(logits))
    own, tokens, logprobs = ops.token_logprobs(free, torch.tensor([0]), torch.tensor([token]), count)
    return Picked(token, math.exp(own), list(zip(tokens[0].tolist(), logprobs[0].exp().tolist())))


def _shaped(given: Tensor, mask: bytes | None, seen: list[int], temperature: float, sampling: Sampling) -> Tensor:
    """Returns a copy of `given [1, V]` whose softmax is the distribution to draw from."""
    row = given.numpy().copy()
    shaped = torch.from_numpy(row)
    if mask is not None:
        ops.apply_mask_(shaped, _bits(mask))
    if sampling.repetition_penalty != 1.0:
        Edits(np.unique(seen), factor=sampling.repetition_penalty).apply_(row[0])
    if temperature >= GREEDY_BELOW:
        if temperature != 1.0:
            row /= temperature
        top_k = sampling.top_k
        if sampling.min_p > 0:  # as a top_k: guidance applies min_p first
            num_likely = int(np.count_nonzero(row >= row.max() + math.log(sampling.min_p)))
            top_k = min(top_k, num_likely) if top_k else num_likely
        if top_k or sampling.top_p < 1:
            top_k_top_p_(shaped, torch.tensor([top_k]), torch.tensor([sampling.top_p], dtype=torch.float32))
    return shaped


def _bits(mask: bytes) -> Tensor:
    """Packs a byte mask into bits: int32 `[1, ceil(V / 32)]`."""
    packed = np.packbits(np.frombuffer(mask, np.uint8), bitorder="little")  # every nonzero byte sets a bit
    words = np.zeros(-(-len(mask) // 32) * 4, np.uint8)
    words[: len(packed)] = packed
    return torch.from_numpy(words.view(np.int32))[None]
