"""fp8: floats of 8 bits (E4M3), a scale for each 128 of them in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.ops.quantizer import QuantizerKernel
from pace.ops.weight_layout import WeightLayout
from pace.quant.format import Format, normalize

E4M3_MAX = 448.0


@dataclass(frozen=True)
class FP8(Format):
    """`code = E4M3(448 x / max|x|)`, rounded to nearest even, over groups of a row.

    DeepSeek-V3 has one scale for 128 rows by 128 columns; a scale of each row's own is as large here and never
    worse."""

    name: ClassVar[str] = "fp8"
    group: int = 128
    """Weights that share a scale, a multiple of 16."""

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout("float8", self.group)

    @property
    def kernel(self) -> QuantizerKernel:
        return QuantizerKernel("fp8")

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        x, largest = normalize(x)
        return e4m3_codes(x * E4M3_MAX), largest / E4M3_MAX, None


def e4m3_codes(x: Tensor) -> Tensor:
    """Bits of the nearest E4M3 float, the even one of two; beyond the range the largest, of which torch before 2.13
    makes NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
