"""Storage of a quantised matrix: codes, and scales of groups of codes. All formats are converted to `QuantizedRows`;
`QuantizedRows.dequantize` defines their values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

CODES = {"int8": torch.int8, "float8": torch.uint8} | {f"int{bits}": torch.uint8 for bits in (1, 2, 3, 4, 5, 6)}
"""Kind of code -> dtype of an unpacked code: -128..127; the bits of a float8_e4m3fn; 0 .. 2^bits - 1. `GRIDS` too."""

SMALL_CODES = {f"int{bits}": bits for bits in (1, 2, 3, 4, 5, 6)}
"""Number of bits of the unsigned codes."""

CODEBOOKS: dict[str, tuple[float, ...]] = {
    # Normal quantiles, relative to the largest weight of a block (QLoRA, arXiv 2305.14314); the constants are those of
    # bitsandbytes.
    "nf4": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
            1.0),
    # Sign, two bits of exponent, one of mantissa, in the order and scale of bitsandbytes.
    "fp4": tuple(sign * value / 192 for sign in (1, -1) for value in (0, 1, 128, 192, 64, 96, 32, 48)),
    # E2M1 (OCP Microscaling Formats 1.0).
    "mxfp4": tuple(sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
    # ggml's IQ4_NL.
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}  # fmt: skip
"""Levels of the 16 int4 codes that are not evenly spaced."""


class Grid(NamedTuple):
    """A code whose digits of 8 neighbours (4 in iq3) form a point of one of ggml's grids. csrc/include/pace/grids.h has
    its storage. An unpacked code is the weight's digit, plus `len(digits)` if its flag is set."""

    group: int
    number_bits: int
    """Bits of a group's integer. b stands for 2 b + 1."""
    digits: tuple[float, ...]
    """Level of each digit, without the flag."""
    flagged: tuple[float, ...]
    """The same with the flag. It is the sign, or in iq1 the side to which all levels are shifted."""


def _signed(group: int, digits: tuple[float, ...]) -> Grid:
    return Grid(group, 4, digits, tuple(-level for level in digits))


_TWO = (1.0, 3.125, 5.375, 0.0)  # the digit 3 is not in the grid
_ONE = (3, (-0.875, 0.125, 1.125, 0.0), (-1.125, -0.125, 0.875, 0.0))

GRIDS = {
    "iq1_s": Grid(32, *_ONE),
    "iq1_m": Grid(16, *_ONE),
    "iq2_xxs": _signed(32, _TWO),
    "iq2_xs": _signed(16, _TWO),
    "iq2_s": _signed(16, _TWO),
    "iq3_xxs": _signed(32, (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5)),
    "iq3_s": _signed(32, (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)),
}
"""Codes of ggml's types IQ1 to IQ3, by name."""

CODES |= dict.fromkeys(GRIDS, torch.uint8)

MIN_GROUP = 16
"""Group sizes are multiples of this number."""


PLANES, PLANE_UNIT = ("int1", "int2", "int5"), 32
"""Kinds of code that are stored as planes of bits, and the multiple of their groups."""

SUPER_BLOCK = 256
"""Number of neighbouring weights in a row that share a super-block's scale: ggml's K types."""

SUPER_GROUPS = {"int2": 16, "int3": 16, "int4": 32, "int5": 32, "int6": 16}
"""Kind of code -> group size in super-blocks."""


@dataclass(frozen=True)
class WeightLayout:
    """Layout of a quantised matrix. Each weight has a code, each group of codes in a row has a scale, and with
    `has_mins` a minimum:

        value[n, k] = level(code[n, k]) * scale[n, k // group] + min[n, k // group]

    level(c) is c for int8, c - `offset` or `codebook[c]` for int2 to int6, and 2 c - 1 for int1. For float8 it is the
    float's value, and for the codes of `GRIDS` a level of the grid. A zero point z is the minimum s (offset - z).

    In super-blocks, `scale_bits` is not None. Scales and minima of groups are then integers of `scale_bits` bits times
    a float16 for each 256 weights. Without minima they are signed. Raises ValueError for a layout without a kernel."""

    code: str
    """A name of `CODES`."""
    group: int | None
    """Number of neighbours in a row that share a scale, a multiple of 16; None for the whole row."""
    has_mins: bool = False
    codebook: str | None = None
    """A name of `CODEBOOKS`, only for int4."""
    offset: int | None = None
    """Offset of int2 to int6 without a codebook; None for half of their range."""
    scale_bits: int | None = None
    token_inputs: bool = False
    """True if a product rounds its inputs to int8 with one scale for each row of them, as part of its definition
    (`pace.ops.protocol.ForwardOps.linear`). Only for int2 with offset 1 and a scale for each row."""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"codes are {', '.join(CODES)}; got {self.code!r}")
        if self.group is not None and (self.group < MIN_GROUP or self.group % MIN_GROUP):
            raise ValueError(f"a group is a multiple of {MIN_GROUP} weights, or None for a whole row; got {self.group}")
        if self.codebook is not None and (self.code != "int4" or self.codebook not in CODEBOOKS):
            raise ValueError(
                f"int4 codes may have one of the codebooks {', '.join(CODEBOOKS)}; got {self.codebook!r} for "
                f"{self.code}"
            )
        if self.has_mins and (self.code == "float8" or self.codebook or self.group is None):
            raise ValueError("minima (has_mins) need integer codes in groups, without a codebook")
        if self.code in GRIDS:
            self._check_grid()
        elif self.scale_bits is not None:
            self._check_super_blocks()
        elif self.code in ("int3", "int6"):
            raise ValueError(f"{self.code} codes exist only in super-blocks")
        elif self.code == "int5" and self.group is None or self.code in PLANES and (self.group or 0) % PLANE_UNIT:
            raise ValueError(f"a group of {self.code} codes is a multiple of 32 weights; got {self.group}")
        if self.token_inputs and (self.code, self.group, self.offset) != ("int2", None, 1):
            raise ValueError(f"token_inputs needs int2 codes with offset 1 and a scale a row; got {self}")
        self._set_offset()

    def _check_grid(self) -> None:
        group, bits = GRIDS[self.code][:2]
        if (self.group, self.scale_bits, self.has_mins) != (group, bits, False):
            raise ValueError(
                f"{self.code} has groups of {group} with scales of {bits} bits, and no minima; got {self.group}, "
                f"{self.scale_bits}, {self.has_mins}"
            )

    def _check_super_blocks(self) -> None:
        if self.group != SUPER_GROUPS.get(self.code):
            known = ", ".join(f"{code} in groups of {group}" for code, group in SUPER_GROUPS.items())
            raise ValueError(f"super-blocks have codes of {known}; got {self.code} in groups of {self.group}")
        if self.codebook not in (None, "iq4_nl"):
            raise ValueError(f"the only codebook of super-blocks is iq4_nl; got {self.codebook!r}")
        by_32 = self.group == 32
        if self.scale_bits not in ((6,) if by_32 else (4,) if self.has_mins else (6, 8)):
            raise ValueError(
                "scales of super-blocks have 6 bits, or, in groups of 16, 4 with minima and 6 or 8 without; got "
                f"{self.scale_bits}"
            )

    def _set_offset(self) -> None:
        has_offset = self.code in SMALL_CODES and self.code != "int1" and not self.codebook
        most = 1 << SMALL_CODES.get(self.code, 0)
        if self.offset is not None and not (has_offset and 0 <= self.offset < most):
            raise ValueError(
                f"an offset is a code of int2 to int6 without a codebook; got {self.offset} for {self.code}"
            )
        if has_offset and self.offset is None:
            object.__setattr__(self, "offset", most // 2)

    def __str__(self) -> str:
        parts = [self.codebook or self.code, f"group {self.group}" if self.group else "a scale a row"]
        parts += ["super-blocks"] * self.in_super_blocks + ["minima"] * self.has_mins
        return ", ".join(parts + ["int8 inputs"] * self.token_inputs)

    @property
    def in_super_blocks(self) -> bool:
        return self.scale_bits is not None

    def num_groups(self, k: int) -> int:
        """Number of groups in a row of k; the last one may be shorter."""
        return 1 if self.group is None else -(-k // self.group)

    @property
    def levels(self) -> Tensor | None:
        """float32 level of each code, for int1 to int6 and `GRIDS`; None for other codes."""
        if grid := GRIDS.get(self.code):
            return torch.tensor(grid.digits + grid.flagged)
        if self.code not in SMALL_CODES:
            return None
        if self.codebook:
            return torch.tensor(CODEBOOKS[self.codebook])
        if self.code == "int1":
            return torch.tensor([-1.0, 1.0])
        return torch.arange(float(1 << SMALL_CODES[self.code])) - self.offset


@dataclass(frozen=True)
class MixedLayout:
    """A weight whose rows are stored in several layouts: the number of rows of each part, top down, and its layout.

    A weight of gate and up rows has two parts of equal size. Raises ValueError for fewer than two parts, and for
    adjacent parts of the same layout."""

    parts: tuple[tuple[int, torch.dtype | WeightLayout], ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2 or any(rows < 1 for rows, _ in self.parts):
            raise ValueError(f"a mixed layout has two parts or more, of at least one row each; got {self.parts}")
        for (_, above), (_, below) in zip(self.parts, self.parts[1:]):
            if above == below:
                raise ValueError(f"neighbours that are stored alike are one part; got two of {above}")

    def __str__(self) -> str:
        return "; ".join(f"{rows} rows of {layout}" for rows, layout in self.parts)


AnyLayout = torch.dtype | WeightLayout | MixedLayout


def parts_of(layout: AnyLayout, n: int) -> tuple[tuple[int, torch.dtype | WeightLayout], ...]:
    """Returns the parts of a weight of n rows. Raises ValueError if a mixed layout has another number of rows."""
    if not isinstance(layout, MixedLayout):
        return ((n, layout),)
    if (rows := sum(rows for rows, _ in layout.parts)) != n:
        raise ValueError(f"a weight of {n} rows cannot have parts of {rows} rows in all")
    return layout.parts


def layout_of_rows(layout: AnyLayout, row: int, count: int) -> torch.dtype | WeightLayout:
    """Returns the layout of rows `row .. row + count` of a weight. Raises ValueError if they span several parts."""
    if not isinstance(layout, MixedLayout):
        return layout
    first = 0
    for rows, of_part in layout.parts:
        if first <= row and row + count <= first + rows:
            return of_part
        first += rows
    raise ValueError(f"rows {row} to {row + count} of a weight are in no one of its parts ({layout})")


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Rows of a quantised matrix, one code per element: the output of readers and quantisers, and the input of
    `pack_quantized_`.

    codes `[rows, K]` of `CODES[layout.code]`; scales, and mins if the layout has them, float32 `[rows, groups]`. In
    super-blocks scales and mins are int8. They are multiplied by `super_scales` and `super_mins`, float16
    `[rows, K / 256]`. `order` is an int64 permutation `[K]`: column j of codes multiplies element `order[j]` of the
    input; None: j. With `paired_k` = K, int4 codes come two in a byte, uint8 `[rows, ceil(K / 2)]`, the first in the
    low bits. Most files store them so; this avoids unpacking them. Raises ValueError for inconsistent shapes, dtypes or
    codes."""

    layout: WeightLayout
    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None
    order: Tensor | None = None
    paired_k: int | None = None
    super_scales: Tensor | None = None
    super_mins: Tensor | None = None

    def __post_init__(self) -> None:
        codes, layout = self.codes, self.layout
        if codes.ndim != 2 or codes.dtype != CODES[layout.code]:
            raise ValueError(
                f"{layout.code} codes are a matrix of {CODES[layout.code]}; got {codes.dtype} of shape "
                f"{tuple(codes.shape)}"
            )
        if self.paired_k is not None and (layout.code != "int4" or codes.shape[1] != -(-self.paired_k // 2)):
            raise ValueError(
                "only int4 codes come in pairs, ceil(K / 2) bytes a row; got "
                f"{layout.code} codes of shape {tuple(codes.shape)} for K = {self.paired_k}"
            )
        self._check_scales()
        k = self.shape[1]
        if self.order is not None and (tuple(self.order.shape) != (k,) or self.order.dtype != torch.int64):
            raise ValueError(f"order is int64 ({k},); got {self.order.dtype} of shape {tuple(self.order.shape)}")
        levels = layout.levels
        if levels is not None and self.paired_k is None and codes.numel() and codes.max() >= len(levels):
            raise ValueError(f"{layout.code} codes are 0..{len(levels) - 1}; got {codes.max().item()}")

    def _check_scales(self) -> None:
        layout, (num_rows, k) = self.layout, self.shape
        in_blocks = layout.in_super_blocks
        if in_blocks and k % SUPER_BLOCK:
            raise ValueError(f"rows of super-blocks have a multiple of {SUPER_BLOCK} weights; got {k}")
        of_groups = (num_rows, layout.num_groups(k)), torch.int8 if in_blocks else torch.float32
        of_blocks = (num_rows, k // SUPER_BLOCK), torch.float16
        for name, wanted, (shape, dtype) in (
            ("scales", True, of_groups),
            ("mins", layout.has_mins, of_groups),
            ("super_scales", in_blocks, of_blocks),
            ("super_mins", in_blocks and layout.has_mins, of_blocks),
        ):
            values = getattr(self, name)
            if (values is not None) != wanted:
                raise ValueError(
                    f"a layout of {layout} has {'' if wanted else 'no '}{name}; got {'none' if wanted else 'some'}"
                )
            if values is not None and (tuple(values.shape) != shape or values.dtype != dtype):
                raise ValueError(f"{name} are {dtype} {shape}; got {values.dtype} of shape {tuple(values.shape)}")

    @cached_property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] if self.paired_k is None else self.paired_k

    def unpaired(self) -> QuantizedRows:
        """Returns the same rows with one byte for each code."""
        if self.paired_k is None:
            return self
        pairs = self.codes.to(torch.int16)
        codes = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)
        return replace(self, codes=codes[:, : self.paired_k], paired_k=None)

    def take(self, rows: slice | Tensor) -> QuantizedRows:
        """Returns some of the rows; a view if `rows` is a slice."""
        per_row = ("codes", "scales", "mins", "super_scales", "super_mins")
        return replace(self, **{name: part[rows] for name in per_row if (part := getattr(self, name)) is not None})

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors of the rows, in a fixed order."""
        return self.codes, self.scales, self.mins, self.order, self.super_scales, self.super_mins

    def group_scales(self) -> tuple[Tensor, Tensor | None]:
        """Returns the exact scales of groups, float32 `[rows, groups]`, and their minima or None."""
        if not self.layout.in_super_blocks:
            return self.scales, self.mins
        groups = SUPER_BLOCK // self.layout.group

        def times(numbers: Tensor | None, supers: Tensor | None) -> Tensor | None:
            return None if numbers is None else numbers * supers.float().repeat_interleave(groups, dim=1)

        return times(self.scales, self.super_scales), times(self.mins, self.super_mins)

    @property
    def nbytes(self) -> int:
        """Bytes of its contents, with one byte for each code."""
        return math.prod(self.shape) + sum(part.nbytes for part in self.tensors()[1:] if part is not None)

    def dequantize(self) -> Tensor:
        """Returns float32 `[rows, K]`, columns in the order of the input: the definition of the format."""
        rows, k = self.shape
        layout = self.layout
        if layout.code == "float8":
            levels = self.codes.view(torch.float8_e4m3fn).float()
        elif (table := layout.levels) is not None:
            levels = table[self.unpaired().codes.long()]
        else:
            levels = self.codes.float()
        group = layout.group or k
        scales, mins = self.group_scales()
        values = levels * scales.repeat_interleave(group, dim=1)[:, :k]
        if mins is not None:
            values += mins.repeat_interleave(group, dim=1)[:, :k]
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order, values)
        return values
