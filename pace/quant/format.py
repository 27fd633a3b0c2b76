"""What every format of weights is: a name, options, and how rows of floats become codes and scales, here in plain
torch. The kernels do the same (`pace.ops.native.quantize`), in a fraction of the time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from pace.ops.quantizer import QuantizerKernel
from pace.ops.weight_layout import CODES, SMALL_CODES, SUPER_BLOCK, QuantizedRows, WeightLayout

CHUNK_ELEMENTS = 1 << 15
"""Rows are quantised by so many elements at a time: intermediates stay in the caches, and torch runs each operation on
the thread that asked for it (its grain), as several load at once."""


@dataclass(frozen=True)
class Format(ABC):
    """A format with its options, which are the fields of a child; raises ValueError for those that make no sense.

    Every row is quantised by itself, so that a matrix may come in any pieces of rows."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def layout(self) -> WeightLayout:
        """How `quantize` stores rows."""

    @abstractmethod
    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """codes `[R, G, group]` of any dtype, scales `[R, G]` and, where the layout has them, mins `[R, G]`, of groups
        `x [R, G, group]` in float32, all finite, not to be written to. The last group of a row comes by itself where it
        is shorter."""

    @property
    def kernel(self) -> QuantizerKernel | None:
        """What gives the same bits in C++; None for a format that has nothing such, which loads ten times as slowly."""
        return None

    def final_scales(self, scales: Tensor) -> Tensor:
        """What becomes of the scales `[R, groups]` of whole rows: those of groups are rounded, as they are packed."""
        return scales if self.layout.group is None else as_packed(scales)

    def __post_init__(self) -> None:
        _ = self.layout  # raises

    def quantize(self, rows: Tensor, name: str = "the matrix") -> QuantizedRows:
        """Of `rows [R, K]` in any float dtype. Scales and minima of groups are rounded to 11 bits, as they are packed,
        so that `dequantize()` gives the very weights that are computed with. Raises ValueError that says `name` where a
        weight is NaN or infinite."""
        layout, (num_rows, k) = self.layout, rows.shape
        groups, group = layout.num_groups(k), layout.group or k
        codes = torch.empty(num_rows, k, dtype=CODES[layout.code])
        scales = torch.empty(num_rows, groups)
        mins = torch.empty(num_rows, groups) if layout.has_mins else None
        whole = k // group
        for start in range(0, num_rows, step := max(1, CHUNK_ELEMENTS // k)):
            piece = slice(start, start + step)
            x = rows[piece].float()
            check_finite(x, name)
            for columns, groups_of in (
                (slice(0, whole * group), slice(0, whole)),
                (slice(whole * group, k), slice(whole, groups)),
            ):
                if columns.start == columns.stop:
                    continue
                part = x[:, columns]
                found, scales[piece, groups_of], lows = self._quantize(
                    part.unflatten(1, (-1, min(group, part.shape[1])))
                )
                codes[piece, columns] = found.flatten(1)
                if mins is not None:
                    mins[piece, groups_of] = lows
        return QuantizedRows(layout, codes, self.final_scales(scales), None if mins is None else as_packed(mins))

    def bits_per_weight(self, k: int = 4096) -> float:
        """Codes, scales and minima of a row of k weights, without padding."""
        layout = self.layout
        groups, of_each = layout.num_groups(k), 1 + layout.has_mins
        if layout.in_super_blocks:
            scale_bits = layout.scale_bits * groups * of_each + 16 * k / SUPER_BLOCK * of_each
        else:
            scale_bits = 32 * groups if layout.group is None else 16 * groups * of_each + 8
        return SMALL_CODES.get(layout.code, 8) + scale_bits / k

    def for_width(self, k: int) -> Format:
        """What rows of k weights are stored in: another format where this one has no place for them."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Name and options, as `read_format` takes them."""
        return {"format": self.name, **asdict(self)}

    def __str__(self) -> str:
        other = ", ".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"{self.name} ({other})" if other else self.name


def check_finite(x: Tensor, name: str) -> None:
    """Raises ValueError where an element is NaN or infinite."""
    if not all(map(torch.isfinite, x.aminmax())):
        row, column = (~x.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"{name} holds {x[row, column].item()}, which cannot be quantised; load it without quantization, or leave it as floats by overrides"
        )


def as_packed(scales: Tensor) -> Tensor:
    """Rounded to 11 bits (at most 2^-11 off, relatively), as they are packed: a float16 times a power of two of the
    row."""
    mantissa, exponent = torch.frexp(scales.double())
    return torch.ldexp((mantissa * 2048).round(), exponent - 11).float()


def normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x by the largest magnitude of its group, and these `[R, G]`; groups of zeros are left as they are, with 0."""
    largest = x.abs().amax(-1)
    return x / torch.where(largest > 0, largest, 1.0)[..., None], largest


def ordered_sum(x: Tensor) -> Tensor:
    """Over the last dimension, in an order that all kernels share, so that their sums are these to the bit: sixteen
    sums, of every sixteenth element, ascending; then the first half of them plus the second, down to one."""
    x = functional.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    sums = torch.zeros_like(x[..., 0, :])
    for part in x.unbind(-2):
        sums += part
    while sums.shape[-1] > 1:
        first, second = sums.chunk(2, dim=-1)
        sums = first + second
    return sums[..., 0]


def count_below(x: Tensor, bounds: Tensor) -> Tensor:
    """How many of the bounds lie below each element, uint8: for few bounds twice as fast as `torch.bucketize`."""
    count = (x > bounds[0]).view(torch.uint8)
    for bound in bounds[1:]:
        count += (x > bound).view(torch.uint8)
    return count


def power_of_two(exponents: Tensor) -> Tensor:
    """float32 of E8M0 bytes: 2^(byte - 127), NaN of 255."""
    exponents = exponents.view(torch.uint8).int()
    powers = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)  # 2^-127 is subnormal
    return torch.where(exponents == 255, torch.nan, powers)
