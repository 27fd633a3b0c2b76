"""How a quantised matrix is stored: codes, and scales of groups of them. `QuantizedRows` is what every format is
reduced to, and `QuantizedRows.dequantize` the definition of what it means."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

CODES = {"int8": torch.int8, "int4": torch.uint8, "float8": torch.uint8}
"""Kind of code -> dtype that holds one each, unpacked: -128..127; 0..15; the bits of a float8_e4m3fn."""

CODEBOOKS: dict[str, tuple[float, ...]] = {
    # Normal quantiles, of the largest of a block (QLoRA, arXiv 2305.14314); the constants are those of bitsandbytes.
    "nf4": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
            -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
            0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    # Sign, two bits of exponent, one of mantissa, in the order and scale of bitsandbytes.
    "fp4": tuple(sign * value / 192 for sign in (1, -1) for value in (0, 1, 128, 192, 64, 96, 32, 48)),
    # E2M1 (OCP Microscaling Formats 1.0).
    "mxfp4": tuple(sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
    # Of ggml's IQ4_NL.
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}  # fmt: skip
"""Levels of the 16 codes of int4, where they are not evenly spaced."""

INT8_FACTORS = {None: 1, "iq4_nl": 1, "mxfp4": 2}
"""Codebooks (and none) whose levels, times this, are int8 codes: rows that have them can be held in int8 as well."""

MIN_GROUP = 16
"""Groups are multiples of it."""


@dataclass(frozen=True)
class WeightLayout:
    """Layout of a quantised matrix: a code for each weight, a scale for each group of codes in a row, and with
    `has_mins` a minimum for each group:

        value[n, k] = level(code[n, k]) * scale[n, k // group] + min[n, k // group]

    level(c) is c for int8, c - 8 or `codebook[c]` for int4, and the float's value for float8. A zero point z is the
    minimum s (8 - z). Raises ValueError for a layout that no kernel has."""

    code: str
    """A name of `CODES`."""
    group: int | None
    """Neighbours in a row that share a scale, a multiple of 16; None for the whole row."""
    has_mins: bool = False
    codebook: str | None = None
    """A name of `CODEBOOKS`, for int4 alone."""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"codes are {', '.join(CODES)}; got {self.code!r}")
        if self.group is not None and (self.group < MIN_GROUP or self.group % MIN_GROUP):
            raise ValueError(f"a group is a multiple of {MIN_GROUP} weights, or None for a whole row; got {self.group}")
        if self.codebook is not None and (self.code != "int4" or self.codebook not in CODEBOOKS):
            raise ValueError(
                f"int4 codes may have one of the codebooks {', '.join(CODEBOOKS)}; got {self.codebook!r} for {self.code}"
            )
        if self.has_mins and (self.code == "float8" or self.codebook or self.group is None):
            raise ValueError("integer codes in groups alone have minima")

    def __str__(self) -> str:
        parts = [self.codebook or self.code, f"group {self.group}" if self.group else "a scale a row"]
        return ", ".join(parts + ["minima"] * self.has_mins)

    def num_groups(self, k: int) -> int:
        """Of a row of k; the last one may be shorter."""
        return 1 if self.group is None else -(-k // self.group)

    @property
    def levels(self) -> Tensor | None:
        """float32 `[16]` of int4, by code; None of the others."""
        if self.code != "int4":
            return None
        return torch.tensor(CODEBOOKS[self.codebook]) if self.codebook else torch.arange(16.0) - 8


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Rows of a quantised matrix, one code an element: what readers and quantisers make, and `pack_quantized_` takes.

    codes `[rows, K]` of `CODES[layout.code]`; scales, and mins where the layout has them, float32 `[rows, groups]`.
    `order`, an int64 permutation `[K]`, says that column j of codes multiplies element `order[j]` of the input; None:
    j. With `paired_k` = K, codes of int4 come two in a byte, uint8 `[rows, ceil(K / 2)]`, the first in the low bits: as
    most files have them, so that nobody need take them apart. Raises ValueError where shapes, dtypes or codes do not
    fit."""

    layout: WeightLayout
    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None
    order: Tensor | None = None
    paired_k: int | None = None

    def __post_init__(self) -> None:
        codes, layout = self.codes, self.layout
        if codes.ndim != 2 or codes.dtype != CODES[layout.code]:
            raise ValueError(
                f"{layout.code} codes are a matrix of {CODES[layout.code]}; got {codes.dtype} of shape {tuple(codes.shape)}"
            )
        if self.paired_k is not None and (layout.code != "int4" or codes.shape[1] != -(-self.paired_k // 2)):
            raise ValueError(
                f"codes of int4 alone come in pairs, ceil(K / 2) bytes a row; got {layout.code} codes of shape {tuple(codes.shape)} for K = {self.paired_k}"
            )
        k = self.shape[1]
        groups = (codes.shape[0], layout.num_groups(k))
        if (self.mins is not None) != layout.has_mins:
            raise ValueError(
                f"a layout {'with' if layout.has_mins else 'without'} minima was given {'none' if layout.has_mins else 'some'}"
            )
        for name, values in (("scales", self.scales), ("mins", self.mins)):
            if values is not None and (tuple(values.shape) != groups or values.dtype != torch.float32):
                raise ValueError(f"{name} are float32 {groups}; got {values.dtype} of shape {tuple(values.shape)}")
        if self.order is not None and (tuple(self.order.shape) != (k,) or self.order.dtype != torch.int64):
            raise ValueError(f"order is int64 ({k},); got {self.order.dtype} of shape {tuple(self.order.shape)}")
        if layout.code == "int4" and self.paired_k is None and codes.numel() and codes.max() > 15:
            raise ValueError(f"int4 codes are 0..15; got {codes.max().item()}")

    @cached_property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] if self.paired_k is None else self.paired_k

    def unpaired(self) -> QuantizedRows:
        """The same with a code an element."""
        if self.paired_k is None:
            return self
        pairs = self.codes.to(torch.int16)
        codes = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)
        return replace(self, codes=codes[:, : self.paired_k], paired_k=None)

    def as_layout(self, layout: WeightLayout) -> QuantizedRows:
        """The same values in a layout that `common_layout` gave for it and others."""
        if layout == self.layout:
            return self
        if layout.code != self.layout.code and self.paired_k is not None:
            return self.unpaired().as_layout(layout)
        groups = layout.num_groups(self.shape[1])
        repeats = groups if self.layout.group is None else self.layout.group // layout.group

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(repeats, dim=1)[:, :groups].contiguous()

        codes, scales = self.codes, self.scales
        if self.layout.code != layout.code:  # from int4 to int8
            factor = INT8_FACTORS[self.layout.codebook]
            codes, scales = (self.layout.levels * factor).to(torch.int8)[codes.int()], scales / factor
        mins = (
            spread(self.mins)
            if self.mins is not None
            else torch.zeros(codes.shape[0], groups)
            if layout.has_mins
            else None
        )
        return QuantizedRows(layout, codes, spread(scales), mins, self.order, self.paired_k)

    @property
    def nbytes(self) -> int:
        """Of what it holds, a byte for each code."""
        return math.prod(self.shape) + sum(
            part.nbytes for part in (self.scales, self.mins, self.order) if part is not None
        )

    def dequantize(self) -> Tensor:
        """float32 `[rows, K]`, columns in the order of the input: the definition."""
        rows, k = self.shape
        layout = self.layout
        if layout.code == "float8":
            levels = self.codes.view(torch.float8_e4m3fn).float()
        elif layout.code == "int4":
            levels = layout.levels[self.unpaired().codes.long()]
        else:
            levels = self.codes.float()
        group = layout.group or k
        values = levels * self.scales.repeat_interleave(group, dim=1)[:, :k]
        if self.mins is not None:
            values += self.mins.repeat_interleave(group, dim=1)[:, :k]
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order, values)
        return values


def common_layout(layouts: Iterable[WeightLayout]) -> WeightLayout | None:
    """The smallest layout in which rows of all of these have the same values, so that one product serves them; None
    where there is none: floats beside integers, or codebooks that int8 does not hold."""
    layouts = set(layouts)
    if len(layouts) == 1:
        return layouts.pop()
    codebooks = {layout.codebook for layout in layouts}
    floats = {layout.code == "float8" for layout in layouts}
    if len(floats) > 1 or (True in floats and any(layout.group is None for layout in layouts)):
        return None
    if len(codebooks) > 1 and not codebooks <= INT8_FACTORS.keys():
        return None
    group = math.gcd(*(layout.group or 0 for layout in layouts))
    codes = {layout.code for layout in layouts}
    code = codes.pop() if len(codes) == len(codebooks) == 1 else "int8"
    codebook = codebooks.pop() if code == "int4" else None
    return WeightLayout(code, group or None, any(layout.has_mins for layout in layouts), codebook)
