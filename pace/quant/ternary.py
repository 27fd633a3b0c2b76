"""q1_0, q2_0, tq1_0 and tq2_0 of ggml: one or two bits for each weight, and a float16 scale for each 64 to 256.

They keep models that were trained in one bit or in three levels (Bonsai, BitNet, TriLM), and spoil others. Rounding is
that of llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.ops.weight_layout import WeightLayout
from pace.quant.block_types import Q4_0, as_half, inverse_of
from pace.quant.format import Format


@dataclass(frozen=True)
class OfFewLevels(Format):
    """A type with blocks of `block` weights and no minima. Rows whose width is not a multiple of it become q4_0."""

    code: ClassVar[str]
    block: ClassVar[int]

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(self.code, self.block, offset=1 if self.code == "int2" else None)

    def for_width(self, k: int) -> Format:
        return Q4_0() if k % self.block else self


class Q1_0(OfFewLevels):
    """The sign of each weight times the mean magnitude of 128. Magnitudes are added in ascending order."""

    name, code, block = "q1_0", "int1", 128

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        total = torch.zeros(x.shape[:-1])
        for magnitudes in x.abs().movedim(-1, 0).contiguous():
            total += magnitudes
        return (x >= 0).to(torch.uint8), as_half(total / self.block), None


class Ternary(OfFewLevels):
    """-1, 0 or 1 times the largest magnitude of a block; halves are rounded away from zero."""

    code = "int2"

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        largest = x.abs().amax(-1)
        levels = x * inverse_of(largest)[..., None]
        return 1 + (levels >= 0.5).to(torch.uint8) - (levels <= -0.5).to(torch.uint8), as_half(largest), None


class Q2_0(Ternary):
    name, block = "q2_0", 64


class TQ1_0(Ternary):
    """Stored like tq2_0, whose values are the same. A file of this type has 1.69 bits for each weight."""

    name, block = "tq1_0", 256


class TQ2_0(Ternary):
    name, block = "tq2_0", 256
