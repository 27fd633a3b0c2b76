"""K types of ggml, q2_k to q6_k: super-blocks of 256 weights whose groups have scales of 4 to 8 bits.

Rounding is that of llama.cpp (`quantize_row_q*_K_ref` in ggml/src/ggml-quants.c), but for the order of sums.

An affine type (q2_k, q4_k, q5_k) has minima, none above zero. Several candidates for scale and minimum give levels, and
both are then fitted to these by weighted least squares. A symmetric type (q3_k, q6_k) is fitted the same way, and each
weight's squared error is weighted by its square."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.ops.weight_layout import SMALL_CODES, SUPER_BLOCK, SUPER_GROUPS, QuantizedRows, WeightLayout
from pace.quant.block_types import Q4_0, Q5_0, Q5_1, Q8_0
from pace.quant.format import CHUNK_ELEMENTS, Format, check_finite, ordered_sum

MIN_SCALE = 1e-15
"""Groups whose weights are all smaller, and super-blocks whose scales are all smaller, become zeros."""


@dataclass(frozen=True)
class KType(Format):
    """A type with super-blocks. Rows whose width is not a multiple of 256 are stored in `narrow`."""

    code: ClassVar[str]
    scale_bits: ClassVar[int]
    has_mins: ClassVar[bool]
    narrow: ClassVar[type[Format]]

    @property
    def layout(self) -> WeightLayout:
        group = SUPER_GROUPS[self.code]
        return WeightLayout(
            self.code, group, self.has_mins, offset=0 if self.has_mins else None, scale_bits=self.scale_bits
        )

    def for_width(self, k: int) -> Format:
        return self if k % SUPER_BLOCK == 0 else self.narrow()

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        raise NotImplementedError("super-blocks are quantised whole")

    @abstractmethod
    def quantize_blocks(self, x: Tensor) -> dict[str, Tensor]:
        """Fields of `QuantizedRows` for blocks `x [B, G, group]` in float32. Codes have the shape of x, scales and mins
        `[B, G]`, super_scales and super_mins `[B, 1]`."""

    def quantize(self, rows: Tensor, name: str = "the matrix") -> QuantizedRows:
        """Quantises rows as `Format.quantize` does. Also raises ValueError for rows that are not whole super-blocks,
        and for weights too large for float16 scales."""
        num_rows, k = rows.shape
        if k % SUPER_BLOCK:
            raise ValueError(f"{name} has rows of {k} weights, not whole super-blocks of {SUPER_BLOCK} for {self.name}")
        if not num_rows:
            return self.quantize(rows.new_zeros(1, k), name).take(slice(0))
        found: dict[str, list[Tensor]] = {}
        for start in range(0, num_rows, step := max(1, CHUNK_ELEMENTS // k)):
            x = rows[start : start + step].float()
            check_finite(x, name)
            fields = self.quantize_blocks(x.reshape(-1, SUPER_BLOCK // self.layout.group, self.layout.group))
            for field, values in fields.items():
                if not values.isfinite().all():
                    raise ValueError(
                        f"{name} reaches {x.abs().max():.4g}, beyond the float16 scales of {self.name}; use int8, or "
                        "keep it as floats with overrides"
                    )
                found.setdefault(field, []).append(values.reshape(len(x), -1))
        return QuantizedRows(self.layout, **{field: torch.cat(parts) for field, parts in found.items()})


class AffineKType(KType):
    """`value = code * scale * super_scale + min * super_min`."""

    has_mins = True
    steps: ClassVar[tuple[float, float, int]]
    """Search grid: first offset added to the largest code, step of the offset, and number of steps."""
    by_magnitude: ClassVar[bool] = False
    """True if the fit minimises absolute errors, weighted by the weights' magnitudes. Otherwise it minimises squared
    errors, weighted by the magnitudes plus the group's root mean square."""

    def quantize_blocks(self, x: Tensor) -> dict[str, Tensor]:
        max_code, max_scale = (1 << SMALL_CODES[self.code]) - 1, (1 << self.scale_bits) - 1
        weights = x.abs()
        if not self.by_magnitude:
            mean_square = (ordered_sum(x * x) / x.shape[-1]).double()  # a root in float32 is not always the nearest
            weights = mean_square.sqrt().float()[..., None] + weights
        scales, mins = fit_affine(x, weights, max_code, self.steps, self.by_magnitude)
        scales, super_scales = as_numbers(scales, max_scale)
        mins, super_mins = as_numbers(mins, max_scale)
        scale, low = (scales * super_scales.float())[..., None], (mins * super_mins.float())[..., None]
        codes = ((x + low) / torch.where(scale == 0, 1.0, scale)).round_().clamp_(0, max_code)
        return {
            "codes": torch.where(scale == 0, 0.0, codes).to(torch.uint8),
            "scales": scales.to(torch.int8),
            "mins": mins.to(torch.int8),
            "super_scales": super_scales,
            "super_mins": -super_mins,
        }


def fit_affine(
    x: Tensor, weights: Tensor, max_code: int, steps: tuple[float, float, int], by_magnitude: bool
) -> tuple[Tensor, Tensor]:
    """Scales of groups `[B, G, group]` and the distances of their minima below zero, both `[B, G]`. They are the best
    of several candidates for codes from 0 to `max_code`."""
    low, high = x.amin(-1).clamp_(max=0), x.amax(-1)
    flat = high == low
    length = torch.where(flat, 1.0, high - low)
    above = x - low[..., None]
    sum_w, sum_x = ordered_sum(weights), ordered_sum(weights * x)

    def error(scale: Tensor, low: Tensor, levels: Tensor) -> Tensor:
        off = scale[..., None] * levels + low[..., None] - x
        return ordered_sum(weights * (off.abs() if by_magnitude else off * off))

    def levels_of(inverse: Tensor) -> Tensor:
        return (inverse[..., None] * above).round_().clamp_(0, max_code)

    inverse = divided(max_code, length)
    best_scale, best_low = 1 / inverse, low
    best_error = error(best_scale, best_low, levels_of(inverse))
    first, step, count = (torch.tensor(number) for number in steps)
    for i in range(int(count) + 1):
        levels = levels_of((first + step * i + max_code) / length)
        weighted = weights * levels
        sum_l, sum_l2, sum_xl = ordered_sum(weighted), ordered_sum(weighted * levels), ordered_sum(weighted * x)
        spread = sum_w * sum_l2 - sum_l * sum_l
        scale = (sum_w * sum_xl - sum_x * sum_l) / spread
        start = (sum_l2 * sum_x - sum_l * sum_xl) / spread
        above_zero = start > 0
        scale, start = torch.where(above_zero, sum_xl / sum_l2, scale), torch.where(above_zero, 0.0, start)
        found = error(scale, start, levels)
        better = (spread > 0) & (found < best_error)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, start, best_low)
        best_error = torch.where(better, found, best_error)
    return torch.where(flat, 0.0, best_scale), torch.where(flat, -low, -best_low)


def divided(number: int, x: Tensor) -> Tensor:
    """`number / x`, rounded once. Python's division of a number by a tensor multiplies by the reciprocal instead."""
    return torch.tensor(float(number)) / x


def as_numbers(values: Tensor, max_scale: int) -> tuple[Tensor, Tensor]:
    """Splits non-negative values `[B, G]` into integers up to `max_scale`, in float32, and a float16 step `[B, 1]`."""
    largest = values.amax(-1, keepdim=True)
    numbers = (divided(max_scale, torch.where(largest > 0, largest, 1.0)) * values).round_().clamp_(max=max_scale)
    step = torch.where(largest > 0, largest / max_scale, 0.0).half()
    return torch.where(step > 0, numbers, 0.0), step


class SymmetricKType(KType):
    """`value = (code - offset) * scale * super_scale`."""

    has_mins = False

    @staticmethod
    @abstractmethod
    def fit(x: Tensor) -> Tensor:
        """Returns the scales `[B, G]` of groups."""

    def quantize_blocks(self, x: Tensor) -> dict[str, Tensor]:
        half, max_scale = 1 << SMALL_CODES[self.code] - 1, 1 << self.scale_bits - 1
        scales = self.fit(x)
        largest = scales.gather(-1, scales.abs().argmax(-1, keepdim=True))
        some = ~(largest.abs() < MIN_SCALE)  # NaN counts as a scale here, and is refused later
        inverse = divided(-max_scale, torch.where(some, largest, 1.0))
        numbers = torch.where(some, (inverse * scales).round_().clamp_(-max_scale, max_scale - 1), 0.0)
        super_scales = torch.where(some, 1 / inverse, 0.0).half()
        scale = (numbers * super_scales.float())[..., None]
        codes = (x / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-half, half - 1)
        return {
            "codes": torch.where(scale == 0, float(half), codes + half).to(torch.uint8),
            "scales": numbers.to(torch.int8),
            "super_scales": super_scales,
        }


def largest_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The element of largest magnitude in each group (the first of equals), and True if it counts as nonzero."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))[..., 0]
    some = largest.abs() >= MIN_SCALE
    return torch.where(some, largest, 1.0), some


class Q2K(AffineKType):
    """2 bits, groups of 16."""

    name, code, scale_bits, narrow = "q2_k", "int2", 4, Q4_0
    steps, by_magnitude = (-0.5, 0.1, 15), True


class Q3K(SymmetricKType):
    """3 bits, groups of 16."""

    name, code, scale_bits, narrow = "q3_k", "int3", 6, Q4_0

    @staticmethod
    def fit(x: Tensor) -> Tensor:
        """Begins with the largest weight at -4 steps. Then changes one level at a time if that fits better, in up to
        five passes."""
        largest, some = largest_of(x)
        levels = (divided(-4, largest)[..., None] * x).round_().clamp_(-4, 3)
        weights = x * x
        products, squares = ordered_sum(weights * x * levels), ordered_sum(weights * levels * levels)
        for _ in range(5):
            for i in range(x.shape[-1]):
                value, weight, level = x[..., i], weights[..., i], levels[..., i]
                others, squares_of_others = products - weight * value * level, squares - weight * level * level
                moved = (value * squares_of_others / others).round_().clamp_(-4, 3)
                new_products = others + weight * value * moved
                new_squares = squares_of_others + weight * moved * moved
                better = (others > 0) & (moved != level) & (new_squares > 0)
                better &= new_products * new_products * squares > products * products * new_squares
                levels[..., i] = torch.where(better, moved, level)
                products = torch.where(better, new_products, products)
                squares = torch.where(better, new_squares, squares)
        fitted = products / torch.where(squares > 0, squares, 1.0)
        return torch.where(some & (squares > 0), fitted, 0.0)


class Q4K(AffineKType):
    """4 bits, groups of 32."""

    name, code, scale_bits, narrow = "q4_k", "int4", 6, Q5_0
    steps = (-1.0, 0.1, 20)


class Q5K(AffineKType):
    """5 bits, groups of 32."""

    name, code, scale_bits, narrow = "q5_k", "int5", 6, Q5_1
    steps = (-0.5, 0.1, 15)


class Q6K(SymmetricKType):
    """6 bits, groups of 16."""

    name, code, scale_bits, narrow = "q6_k", "int6", 8, Q8_0

    @staticmethod
    def fit(x: Tensor) -> Tensor:
        """The best of 19 candidates that put the largest weight between 31.1 and 32.9 steps from zero."""
        largest, some = largest_of(x)
        weights = x * x
        best_scale, best = torch.zeros_like(largest), torch.zeros_like(largest)
        for step in (0, *range(-9, 0), *range(1, 10)):
            inverse = -(torch.tensor(0.1) * step + 32) / largest
            levels = (inverse[..., None] * x).round_().clamp_(-32, 31)
            products, squares = ordered_sum(weights * x * levels), ordered_sum(weights * levels * levels)
            better = squares > 0
            if step:
                better &= products * products > best * squares
            fitted = products / torch.where(squares > 0, squares, 1.0)
            best_scale = torch.where(better, fitted, best_scale)
            best = torch.where(better, fitted * products, best)
        return torch.where(some, best_scale, 0.0)
