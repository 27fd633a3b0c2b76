"""int4: 16 evenly spaced levels for each group of weights, around zero or between two ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.ops.quantizer import QuantizerKernel
from pace.ops.weight_layout import WeightLayout
from pace.quant.format import Format, as_packed, normalize, ordered_sum

STEPS_TO_LARGEST = (7.0, 7.5, 8.0, 8.5, 9.0)
"""Tried for the weight of largest magnitude, whose side gets the level 8 steps from zero (the other side has 7).
Relative error of normal weights in groups of 64: 0.107 with max|x| / 7 as step, 0.095 with max|x| / 8 towards the
largest weight, 0.0900 with the best of these, 0.0897 with four times as many."""
SHARES_OF_RANGE = (1.0, 0.95, 0.9)
"""Tried for what the 15 steps span of the weights' range. Relative error as above: 0.089 with the range, 0.084 with the
best of these."""


@dataclass(frozen=True)
class Int4(Format):
    """`value = (code - 8) * scale`, with `symmetric=False` `+ min`; scale and min are those of a few candidates, each
    fitted by least squares to the codes that it gives, which have the least squared error."""

    name: ClassVar[str] = "int4"
    group: int | None = 64
    """Weights that share a scale, a multiple of 16 (32, 64 and 128 are usual)."""
    symmetric: bool = True
    """False gives groups a zero point too: less error, for two more bytes each."""

    @property
    def layout(self) -> WeightLayout:
        if self.group is None and not self.symmetric:
            raise ValueError(
                "groups alone have zero points; with symmetric=False give a group, as 32 or 64, or leave whole rows symmetric"
            )
        return WeightLayout("int4", self.group, has_mins=not self.symmetric)

    @property
    def kernel(self) -> QuantizerKernel:
        return QuantizerKernel("int4" if self.symmetric else "affine int4")

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return symmetric_int4(x) if self.symmetric else affine_int4(x)


def symmetric_int4(x: Tensor) -> tuple[Tensor, Tensor, None]:
    """As `Format._quantize`."""
    x, largest = by_largest(x)
    scales = fitted_scales(x, STEPS_TO_LARGEST)
    codes = x.div_(torch.where(scales == 0, 1.0, scales)[..., None]).round_().clamp_(-8, 7).add_(8)
    return codes, scales * largest[..., 0], None


def by_largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Groups `[..., group]` over their weight of largest magnitude, and these `[..., 1]`; groups of zeros stay
    zeros."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    return x / torch.where(largest == 0, 1.0, largest), largest


def fitted_scales(x: Tensor, steps_to_largest: Sequence[float], weights: Tensor | None = None) -> Tensor:
    """Returns scales of groups as `by_largest` does, but the best of a few. Each candidate puts the largest weight at a
    certain step from zero, and is then fitted by least squares to the levels it gives. The one with the least squared
    error wins. `weights`, positive, weigh the elements' squared errors."""
    scales, least = torch.zeros(x.shape[:-1]), torch.zeros(x.shape[:-1])
    for steps in steps_to_largest:
        levels = (x * -steps).round_().clamp_(-8, 7)
        weighted = levels if weights is None else levels * weights
        squares, products = ordered_sum(levels * weighted), ordered_sum(x * weighted)
        fitted = products / squares.clamp_(min=torch.finfo(torch.float32).tiny)
        error = -fitted * products  # less the sum of x^2, which is the same for all
        better = error < least
        scales, least = torch.where(better, fitted, scales), torch.where(better, error, least)
    return scales


def affine_int4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `Format._quantize`."""
    x, largest = normalize(x)
    low, high = x.aminmax(dim=-1, keepdim=True)
    length = (high - low).clamp_(min=torch.finfo().tiny)
    unit = (x - low) / length
    size, total = x.shape[-1], ordered_sum(unit)
    scales, mins, least = torch.zeros(total.shape), torch.zeros(total.shape), torch.full(total.shape, torch.inf)
    for share in SHARES_OF_RANGE:
        levels = (unit * (15 / share) + 7.5 * (1 - 1 / share)).round_().clamp_(0, 15)
        sums, squares, products = ordered_sum(levels), ordered_sum(levels.square()), ordered_sum(unit * levels)
        scale = (size * products - total * sums) / (size * squares - sums.square()).clamp_(min=1)
        start = (total - scale * sums) / size
        error = -scale * products - start * total  # less the sum of squares
        better = error < least
        scales, mins, least = (
            torch.where(better, scale, scales),
            torch.where(better, start, mins),
            torch.where(better, error, least),
        )
    scales = as_packed(scales * length[..., 0])
    mins = as_packed(mins * length[..., 0] + low[..., 0] + 8 * scales)
    codes = ((x - mins[..., None]) / torch.where(scales == 0, 1.0, scales)[..., None]).round_().clamp_(-8, 7).add_(8)
    return codes, scales * largest, mins * largest
