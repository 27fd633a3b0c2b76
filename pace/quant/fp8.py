"""fp8: 8-bit floats (E4M3) with one scale for 128 weights of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.ops.weight_layout import WeightLayout
from pace.quant.format import Format, normalize

E4M3_MAX = 448.0


@dataclass(frozen=True)
class FP8(Format):
    """`code = E4M3(448 x / max|x|)`, rounded to nearest even, over groups of a row.

    DeepSeek-V3 has one scale for 128 rows by 128 columns. One scale per row and group takes as much memory here and is
    never less accurate."""

    name: ClassVar[str] = "fp8"
    group: int = 128
    """Weights that share a scale, a multiple of 16."""

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout("float8", self.group)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        x, largest = normalize(x)
        return e4m3_codes(x * E4M3_MAX), largest / E4M3_MAX, None


def e4m3_codes(x: Tensor) -> Tensor:
    """Bits of the nearest E4M3 float; ties round to even. Values out of range become the largest float, since torch
    before 2.13 makes them NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
