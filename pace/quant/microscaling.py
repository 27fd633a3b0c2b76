"""mxfp4 and mxfp8 of the OCP Microscaling Formats 1.0: blocks of 32 floats whose scale is a power of two (E8M0)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.ops.quantizer import QuantizerKernel
from pace.ops.weight_layout import CODEBOOKS, WeightLayout
from pace.quant.format import Format, count_below
from pace.quant.fp8 import e4m3_codes

BLOCK = 32
E8M0_RANGE = (-127, 127)


@dataclass(frozen=True)
class Microscaling(Format):
    """A microscaling format. The scale is 2^e, as section 6.3 of the standard defines it. e is the exponent of the
    block's largest element minus that of the element type's largest number. Larger values are clamped to that
    number."""

    largest_exponent: ClassVar[int]
    """Exponent of the element type's largest number."""

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        exponents = torch.frexp(x.abs().amax(-1)).exponent - 1  # x = m 2^e, 0.5 <= m < 1: the floor of log2 is e - 1
        exponents = (exponents - self.largest_exponent).clamp(*E8M0_RANGE)
        scales, inverses = (torch.ldexp(torch.ones(exponents.shape), powers) for powers in (exponents, -exponents))
        return self._codes(x * inverses[..., None]), scales, None

    @staticmethod
    @abstractmethod
    def _codes(x: Tensor) -> Tensor:
        """Codes of the elements nearest to x; ties round to even."""


@dataclass(frozen=True)
class MXFP4(Microscaling):
    """E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""

    name: ClassVar[str] = "mxfp4"
    largest_exponent: ClassVar[int] = 2

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout("int4", BLOCK, codebook="mxfp4")

    @property
    def kernel(self) -> QuantizerKernel:
        return QuantizerKernel("mxfp4", _E2M1_BOUNDS)

    @staticmethod
    def _codes(x: Tensor) -> Tensor:
        return count_below(x.abs(), _E2M1_BOUNDS) | (x < 0).view(torch.uint8) << 3


@dataclass(frozen=True)
class MXFP8(Microscaling):
    """E4M3 elements."""

    name: ClassVar[str] = "mxfp8"
    largest_exponent: ClassVar[int] = 8

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout("float8", BLOCK)

    @staticmethod
    def _codes(x: Tensor) -> Tensor:
        return e4m3_codes(x)


def _bounds_to_even(levels: Tensor) -> Tensor:
    """Bounds for `count_below` that round ties to even: the midpoints of neighbouring levels. `count_below` assigns a
    bound to the level below, so the bound is slightly smaller if the level above has the even code."""
    halfway = (levels[:-1] + levels[1:]) / 2
    above_is_even = torch.arange(1, len(levels)) % 2 == 0
    return torch.where(above_is_even, torch.nextafter(halfway, torch.zeros(())), halfway)


_E2M1_BOUNDS = _bounds_to_even(torch.tensor(CODEBOOKS["mxfp4"][:8]))
