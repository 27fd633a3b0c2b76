"""nf4 and fp4: the code books of bitsandbytes, blocks of 64 scaled by their largest weight."""

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
"""Scales that share a scale, with double quantisation."""


@dataclass(frozen=True)
class Codebook(Format):
    """`code` of the level nearest to `x / max|x|`, `value = level * max|x|`."""

    group: int = 64
    """Weights that share a scale, a multiple of 16."""
    double_quantization: bool = False
    """Round scales to what bitsandbytes' 8-bit nested statistics would hold. A scale takes 16 bits here in any case:
    this gives that library's weights (whose mean of the scales is the row's here, not the matrix's), and saves
    nothing."""

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
    """Levels are floats of 4 bits: sign, two bits of exponent, one of mantissa, by the largest."""

    name: ClassVar[str] = "fp4"


@cache
def _ascending(codebook: str) -> tuple[Tensor, Tensor | None]:
    """Bounds halfway between ascending levels, and the codes of these; None for 0 to 15."""
    levels = torch.tensor(CODEBOOKS[codebook])
    ascending = levels.unique()
    codes = torch.stack([(levels == level).nonzero()[0, 0] for level in ascending])
    in_order = torch.equal(codes, torch.arange(len(levels)))
    return (ascending[:-1] + ascending[1:]) / 2, None if in_order else codes.to(torch.uint8)


def nested(scales: Tensor) -> Tensor:
    """`scales [R, G]` as double quantisation holds them: less their mean in a row, in blocks of 256 by the largest,
    each the nearest of `dynamic_levels`."""
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
    """The 256 levels of bitsandbytes' signed 8-bit dynamic map, ascending (arXiv 1511.04561): in the decade that ends
    at 10^(i - 6), for i of 0 to 6, the middles of 2^i equal parts of its last nine tenths, their negatives, 0 and 1."""
    levels = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1.0, 2**i + 1)
        middles = ((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (i - 6)).tolist()
        levels += middles + [-level for level in middles]
    return torch.tensor(sorted(levels))
