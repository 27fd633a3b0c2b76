"""int4: 16 evenly spaced levels for each group of weights, symmetric around zero or between a minimum and a maximum."""

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
"""Candidate positions, in steps from zero, of the weight of largest magnitude. Its side has a level 8 steps from zero,
the other side has 7.

Relative error of normally distributed weights in groups of 64: 0.107 with step max|x| / 7. It is 0.095 with max|x| / 8
on the side of the largest weight. The best of these candidates gives 0.0900; four times the number of candidates gives
0.0897."""
SHARES_OF_RANGE = (1.0, 0.95, 0.9)
"""Candidate shares of the weights' range that the 15 steps span. Relative error as above: 0.089 with the whole range,
0.084 with the best of these."""


@dataclass(frozen=True)
class Int4(Format):
    """`value = (code - 8) * scale`, plus `min` with `symmetric=False`.

    Several candidates for scale and min are tried. Each is fitted by least squares to the codes it gives. The one with
    the least squared error is used."""

    name: ClassVar[str] = "int4"
    group: int | None = 64
    """Weights that share a scale, a multiple of 16 (32, 64 and 128 are usual)."""
    symmetric: bool = True
    """False adds a zero point per group: less error, for two more bytes per group."""

    @property
    def layout(self) -> WeightLayout:
        if self.group is None and not self.symmetric:
            raise ValueError("symmetric=False needs a group size, for example group=32")
        return WeightLayout("int4", self.group, has_mins=not self.symmetric)

    @property
    def kernel(self) -> QuantizerKernel:
        return QuantizerKernel("int4" if self.symmetric else "affine int4")

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return symmetric_int4(x) if self.symmetric else affine_int4(x)


def symmetric_int4(x: Tensor) -> tuple[Tensor, Tensor, None]:
    """Symmetric `Format._quantize`: no mins."""
    x, largest = by_largest(x)
    scales = fitted_scales(x, STEPS_TO_LARGEST)
    codes = x.div_(torch.where(scales == 0, 1.0, scales)[..., None]).round_().clamp_(-8, 7).add_(8)
    return codes, scales * largest[..., 0], None


def by_largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divides groups `[..., group]` by their weight of largest magnitude, and returns these weights `[..., 1]` too.
    Groups of zeros stay zero."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    return x / torch.where(largest == 0, 1.0, largest), largest


def fitted_scales(x: Tensor, steps_to_largest: Sequence[float], weights: Tensor | None = None) -> Tensor:
    """Returns the best scales for groups divided as `by_largest` does. Each candidate puts the largest weight a certain
    number of steps from zero. It is then fitted by least squares to the levels it gives, and the one with the least
    squared error wins.

    `weights`: positive weights of the elements' squared errors."""
    scales, best_error = torch.zeros(x.shape[:-1]), torch.zeros(x.shape[:-1])
    for steps in steps_to_largest:
        levels = (x * -steps).round_().clamp_(-8, 7)
        weighted = levels if weights is None else levels * weights
        squares, products = ordered_sum(levels * weighted), ordered_sum(x * weighted)
        fitted = products / squares.clamp_(min=torch.finfo(torch.float32).tiny)
        error = -fitted * products  # less the sum of x^2, which is the same for all candidates
        better = error < best_error
        scales, best_error = torch.where(better, fitted, scales), torch.where(better, error, best_error)
    return scales


def affine_int4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`Format._quantize` with mins."""
    x, largest = normalize(x)
    low, high = x.aminmax(dim=-1, keepdim=True)
    length = (high - low).clamp_(min=torch.finfo().tiny)
    unit = (x - low) / length
    size, total = x.shape[-1], ordered_sum(unit)
    scales, mins, best_error = torch.zeros(total.shape), torch.zeros(total.shape), torch.full(total.shape, torch.inf)
    for share in SHARES_OF_RANGE:
        levels = (unit * (15 / share) + 7.5 * (1 - 1 / share)).round_().clamp_(0, 15)
        sums, squares, products = ordered_sum(levels), ordered_sum(levels.square()), ordered_sum(unit * levels)
        scale = (size * products - total * sums) / (size * squares - sums.square()).clamp_(min=1)
        start = (total - scale * sums) / size
        error = -scale * products - start * total  # less the sum of squares, which is the same for all candidates
        better = error < best_error
        scales, mins, best_error = (
            torch.where(better, scale, scales),
            torch.where(better, start, mins),
            torch.where(better, error, best_error),
        )
    scales = as_packed(scales * length[..., 0])
    mins = as_packed(mins * length[..., 0] + low[..., 0] + 8 * scales)
    codes = ((x - mins[..., None]) / torch.where(scales == 0, 1.0, scales)[..., None]).round_().clamp_(-8, 7).add_(8)
    return codes, scales * largest, mins * largest
