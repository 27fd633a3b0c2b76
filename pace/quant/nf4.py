"""nf4 and fp4: the codebooks of bitsandbytes, in blocks of 64 scaled by their largest weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from pace.ops.quantizer import QuantizerKernel
from pace.ops.weight_layout import CODEBOOKS, WeightLayout
from pace.quant.format import Format, count_below, normalize

NESTED_BLOCK = 256
"""Number of scales that share a scale with double quantisation."""


@dataclass(frozen=True)
class Codebook(Format):
    """`code` is the level nearest to `x / max|x|`, and `value = level * max|x|`."""

    group: int = 64
    """Weights that share a scale, a multiple of 16."""
    double_quantization: bool = False
    """True rounds scales to the values that bitsandbytes' 8-bit nested statistics hold. The weights are then those of
    bitsandbytes, except that the mean of scales is taken per row, not per matrix. It saves no memory: a scale always
    takes 16 bits here."""

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout("int4", self.group, codebook=self.name)

    @property
    def kernel(self) -> QuantizerKernel:
        return QuantizerKernel("codebook", *_ascending(self.name), gives_final_scales=not self.double_quantization)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scales = normalize(x)
        bounds, order = _ascending(self.name)
        below = count_below(x, bounds)
        return below if order is None else order[below.int()], scales, None

    def final_scales(self, scales: Tensor) -> Tensor:
        return super().final_scales(nested(scales) if self.double_quantization else scales)


class NF4(Codebook):
    """Levels are quantiles of the normal distribution (QLoRA, arXiv 2305.14314)."""

    name: ClassVar[str] = "nf4"


class FP4(Codebook):
    """Levels are 4-bit floats (sign, two exponent bits, one mantissa bit) divided by the largest."""

    name: ClassVar[str] = "fp4"


@cache
def _ascending(codebook: str) -> tuple[Tensor, Tensor | None]:
    """Midpoints of the ascending levels, and the levels' codes in that order, or None if these are 0 to 15."""
    levels = torch.tensor(CODEBOOKS[codebook])
    ascending = levels.unique()
    codes = torch.stack([(levels == level).nonzero()[0, 0] for level in ascending])
    in_order = torch.equal(codes, torch.arange(len(levels)))
    return (ascending[:-1] + ascending[1:]) / 2, None if in_order else codes.to(torch.uint8)


def nested(scales: Tensor) -> Tensor:
    """Rounds `scales [R, G]` as double quantisation does. The row's mean is subtracted, blocks of 256 are divided by
    their largest magnitude, and each value becomes the nearest of `dynamic_levels`."""
    mean = scales.double().mean(1, keepdim=True).float()
    levels = dynamic_levels()
    bounds = (levels[:-1] + levels[1:]) / 2
    held = []
    for block in (scales - mean).split(NESTED_BLOCK, dim=1):
        x, largest = normalize(block)
        held.append(levels[torch.bucketize(x, bounds)] * largest[:, None])
    return torch.cat(held, 1) + mean


@cache
def dynamic_levels() -> Tensor:
    """The 256 levels of bitsandbytes' signed 8-bit dynamic map, ascending (arXiv 1511.04561).

    Decade i, for i from 0 to 6, ends at 10^(i - 6). Its last nine tenths are divided into 2^i equal parts. The levels
    are the middles of these parts, their negatives, 0 and 1."""
    levels = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1.0, 2**i + 1)
        middles = ((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (i - 6)).tolist()
        levels += middles + [-level for level in middles]
    return torch.tensor(sorted(levels))
