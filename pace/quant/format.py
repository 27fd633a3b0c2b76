"""Base class of weight formats: a name, options, and the quantisation of rows in plain torch. The kernels
(`pace.ops.native.quantize`) give the same results in a fraction of the time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from pace.ops.kernels.quantize import QUANTIZER_CODES
from pace.ops.quantizer import QuantizerKernel
from pace.ops.weight_layout import CODES, SMALL_CODES, SUPER_BLOCK, QuantizedRows, WeightLayout

CHUNK_ELEMENTS = 1 << 15
"""Rows are quantised in chunks of this many elements. Intermediates then stay in the caches, and chunks do not exceed
torch's parallel grain. Each operation therefore runs on the calling thread; several threads load at once."""


@dataclass(frozen=True)
class Format(ABC):
    """A weight format. Subclasses declare its options as fields; invalid ones raise ValueError.

    Each row is quantised independently, so a matrix may be split into any blocks of rows."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def layout(self) -> WeightLayout:
        """The layout in which `quantize` stores rows."""

    @abstractmethod
    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Quantises groups `x [R, G, group]`, which are float32, finite and read-only. Returns codes `[R, G, group]` of
        any dtype, scales `[R, G]`, and mins `[R, G]` or None.

        A shorter last group of each row comes in a separate call."""

    @property
    def kernel(self) -> QuantizerKernel | None:
        """The C++ kernel that gives the same bits, or None. Without one, loading is ten times slower."""
        return QuantizerKernel(self.name) if self.name in QUANTIZER_CODES else None

    def final_scales(self, scales: Tensor) -> Tensor:
        """Returns the scales `[R, groups]` of whole rows as they are stored. Scales of groups are rounded to what
        packing keeps."""
        return scales if self.layout.group is None else as_packed(scales)

    def __post_init__(self) -> None:
        _ = self.layout  # raises

    def quantize(self, rows: Tensor, name: str = "the matrix") -> QuantizedRows:
        """Quantises `rows [R, K]` of any float dtype.

        Scales and minima of groups are rounded to 11 bits, as packing stores them. `dequantize()` therefore returns
        exactly the weights that kernels compute with. Raises ValueError with `name` if a weight is NaN or infinite."""
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
        """Bits of codes, scales and minima per weight, for rows of k weights, without padding."""
        layout = self.layout
        groups, of_each = layout.num_groups(k), 1 + layout.has_mins
        if layout.in_super_blocks:
            scale_bits = layout.scale_bits * groups * of_each + 16 * k / SUPER_BLOCK * of_each
        else:
            scale_bits = 32 * groups if layout.group is None else 16 * groups * of_each + 8
        return SMALL_CODES.get(layout.code, 8) + scale_bits / k

    def for_width(self, k: int) -> Format:
        """The format for rows of k weights: a different one if this format does not support that width."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Name and options, as arguments of `read_format`."""
        return {"format": self.name, **asdict(self)}

    def __str__(self) -> str:
        other = ", ".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"{self.name} ({other})" if other else self.name


def check_finite(x: Tensor, name: str) -> None:
    """Raises ValueError if an element is NaN or infinite."""
    if not all(map(torch.isfinite, x.aminmax())):
        row, column = (~x.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"{name} holds {x[row, column].item()}, which cannot be quantised; load it without quantization, or keep "
            "it as floats with overrides"
        )


def as_packed(scales: Tensor) -> Tensor:
    """Rounds to 11 bits (relative error at most 2^-11), as packing does: a float16 times a power of two of the row."""
    mantissa, exponent = torch.frexp(scales.double())
    return torch.ldexp((mantissa * 2048).round(), exponent - 11).float()


def normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divides x by the largest magnitude of its group, and returns these magnitudes `[R, G]` too. Groups of zeros stay
    unchanged, with magnitude 0."""
    largest = x.abs().amax(-1)
    return x / torch.where(largest > 0, largest, 1.0)[..., None], largest


def ordered_sum(x: Tensor) -> Tensor:
    """Sums over the last dimension in the order all kernels use, so that results are equal to the bit. First come
    sixteen partial sums, each over every sixteenth element in ascending order. Then the second half of them is added to
    the first until one is left."""
    x = functional.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    sums = torch.zeros_like(x[..., 0, :])
    for part in x.unbind(-2):
        sums += part
    while sums.shape[-1] > 1:
        first, second = sums.chunk(2, dim=-1)
        sums = first + second
    return sums[..., 0]


def count_below(x: Tensor, bounds: Tensor) -> Tensor:
    """Number of bounds below each element, as uint8. For few bounds this is twice as fast as `torch.bucketize`."""
    count = (x > bounds[0]).view(torch.uint8)
    for bound in bounds[1:]:
        count += (x > bound).view(torch.uint8)
    return count


def power_of_two(exponents: Tensor) -> Tensor:
    """Converts E8M0 bytes to float32: 2^(byte - 127), and NaN for 255."""
    exponents = exponents.view(torch.uint8).int()
    powers = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)  # 2^-127 is subnormal
    return torch.where(exponents == 255, torch.nan, powers)
