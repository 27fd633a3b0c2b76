"""Block types of ggml: 32 weights share a float16 scale and, in some types, a float16 minimum.

Rounding is that of llama.cpp and the gguf package. The K types fall back to these for rows that are not a multiple of
256 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.ops.weight_layout import SMALL_CODES, WeightLayout
from pace.quant.format import Format

BLOCK = 32


@dataclass(frozen=True)
class BlockType(Format):
    """A type with blocks of 32 weights. Codes are computed with scales and minima before these are rounded to
    float16."""

    code: ClassVar[str]
    has_mins: ClassVar[bool] = False

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(self.code, BLOCK, self.has_mins, offset=0 if self.has_mins else None)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.has_mins:
            return affine_block(x, (1 << SMALL_CODES[self.code]) - 1)
        return symmetric_block(x, 1 << SMALL_CODES[self.code] - 1)


def symmetric_block(x: Tensor, half: int) -> tuple[Tensor, Tensor, None]:
    """Puts the weight of largest magnitude `half` steps below zero; its scale is negative if that weight is
    positive."""
    scales = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -half
    codes = (x * inverse_of(scales) + (half + 0.5)).trunc_().clamp_(0, 2 * half - 1)
    return codes, as_half(scales[..., 0]), None


def affine_block(x: Tensor, max_code: int) -> tuple[Tensor, Tensor, Tensor]:
    """Divides the range from the smallest to the largest weight into `max_code` steps."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    scales = (high - low) / max_code
    codes = ((x - low) * inverse_of(scales) + 0.5).trunc_().clamp_(0, max_code)
    return codes, as_half(scales[..., 0]), as_half(low[..., 0])


def inverse_of(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, 1 / scales)


def as_half(scales: Tensor) -> Tensor:
    """Rounds to float16. Raises ValueError if a value is outside its range."""
    rounded = scales.half().float()
    if not rounded.isfinite().all():
        raise ValueError(
            f"weights are too large: their scales reach {scales.abs().max():.4g}, beyond float16; use int8, or keep "
            "them as floats with overrides"
        )
    return rounded


class Q4_0(BlockType):
    name, code = "q4_0", "int4"


class Q4_1(BlockType):
    name, code, has_mins = "q4_1", "int4", True


class Q5_0(BlockType):
    name, code = "q5_0", "int5"


class Q5_1(BlockType):
    name, code, has_mins = "q5_1", "int5", True


class Q8_0(BlockType):
    name, code = "q8_0", "int8"

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        scales = x.abs().amax(-1, keepdim=True) / 127
        exact = x * inverse_of(scales)
        codes = (exact.abs() + 0.5).floor_().clamp_(max=127).copysign_(exact)
        return codes, as_half(scales[..., 0]), None
