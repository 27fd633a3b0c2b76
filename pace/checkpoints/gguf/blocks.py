"""The block types of ggml, in which GGUF files hold matrices: bytes of blocks to codes, scales and minima.

A row is a sequence of blocks of 32 or 256 weights; the types are described by ggml's structs (ggml/src/ggml-common.h)
and their `dequantize_row_*` (ggml/src/ggml-quants.c). Each maps onto a layout without loss beyond one fp32 rounding of
a minimum: types of up to 4 bits onto int4, of 5 to 8 bits onto int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pace.ops.weight_layout import CODES, QuantizedRows, WeightLayout
from pace.quant.format import CHUNK_ELEMENTS, power_of_two

Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes `[blocks, weights]`, or pairs of codes `[blocks, weights / 2]`; scales and mins `[blocks, groups]`."""


@dataclass(frozen=True)
class BlockType:
    """A type that is stored in blocks."""

    name: str
    weights: int
    """Of a block."""
    nbytes: int
    """Of a block."""
    layout: WeightLayout
    parts: Callable[[Tensor], Parts]
    """Of uint8 `[blocks, nbytes]`."""
    in_pairs: bool = False
    """Codes come two in a byte (`QuantizedRows.paired_k`)."""

    def row_bytes(self, k: int) -> int:
        """Of a row of k weights; ValueError where these are no whole blocks."""
        if k % self.weights:
            raise ValueError(f"rows of {k} weights are no whole number of {self.name} blocks of {self.weights}")
        return k // self.weights * self.nbytes

    def decode(self, rows: Tensor) -> QuantizedRows:
        """The rows in uint8 `[rows, row_bytes(k)]`."""
        num_rows, blocks = rows.shape[0], rows.reshape(-1, self.nbytes)
        groups = self.layout.num_groups(self.weights)
        codes = torch.empty(
            len(blocks), self.weights // 2 if self.in_pairs else self.weights, dtype=CODES[self.layout.code]
        )
        scales = torch.empty(len(blocks), groups)
        mins = torch.empty(len(blocks), groups) if self.layout.has_mins else None
        for start in range(0, len(blocks), step := CHUNK_ELEMENTS // self.weights):
            piece = slice(start, start + step)
            codes[piece], scales[piece], lows = self.parts(blocks[piece])
            if mins is not None:
                mins[piece] = lows

        def by_row(part: Tensor) -> Tensor:
            return part.view(num_rows, rows.shape[1] // self.nbytes * part.shape[1])

        k = rows.shape[1] // self.nbytes * self.weights
        return QuantizedRows(
            self.layout,
            by_row(codes),
            by_row(scales),
            None if mins is None else by_row(mins),
            paired_k=k if self.in_pairs else None,
        )


def half(blocks: Tensor, byte: int) -> Tensor:
    """The fp16 number at `byte` of each block, as float32 `[blocks, 1]`."""
    return blocks[:, byte : byte + 2].contiguous().view(torch.float16).float()


def fields(packed: Tensor, chunk: int, bits: int) -> Tensor:
    """Fields of `bits` bits of uint8 `[blocks, bytes]`: of each `chunk` bytes first the lowest field of every byte,
    then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    parts = packed.reshape(packed.shape[0], -1, 1, chunk) >> shifts
    return parts.bitwise_and_((1 << bits) - 1).flatten(1)


def pairs(packed: Tensor, chunk: int) -> Tensor:
    """Neighbours of `fields(packed, chunk, 4)`, two in a byte, the first in the low bits."""
    first, second = packed.reshape(packed.shape[0], -1, chunk // 2, 2).unbind(-1)
    return torch.cat([first & 15 | second << 4, first >> 4 | second & 0xF0], dim=-1).flatten(1)


def _q4_0(blocks: Tensor) -> Parts:
    return pairs(blocks[:, 2:], 16), half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    scale = half(blocks, 0)
    return pairs(blocks[:, 4:], 16), scale, half(blocks, 2) + 8 * scale  # s c + m = s (c - 8) + (m + 8 s)


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    return (fields(low, 16, 4) | fields(high, 1, 1) << 4).view(torch.int8)


def _q5_0(blocks: Tensor) -> Parts:
    return _five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16, half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]), half(blocks, 0), half(blocks, 2)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].view(torch.int8), half(blocks, 0), None


def _q2_k(blocks: Tensor) -> Parts:
    groups = blocks[:, :16]
    # Codes 0..3 as 8..11, which stand for 0..3.
    return fields(blocks[:, 16:80], 32, 2) | 8, half(blocks, 80) * (groups & 15), -half(blocks, 82) * (groups >> 4)


def _q3_k(blocks: Tensor) -> Parts:
    high = fields(blocks[:, :32], 32, 1)
    groups = fields(blocks[:, 96:104], 8, 4) | fields(blocks[:, 104:108], 4, 2) << 4
    codes = fields(blocks[:, 32:96], 32, 2) + 4 * high + 4  # a high bit says that nothing is taken off: -4..3 as 4..11
    return codes, half(blocks, 108) * (groups.view(torch.int8) - 32), None


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K, which begin alike: two fp16 numbers, and for each of 8 groups 6 bits of a scale and 6 of a
    minimum."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], 1)
    mins = torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1)
    return half(blocks, 0) * scales, -half(blocks, 2) * mins


def _q4_k(blocks: Tensor) -> Parts:
    scales, mins = _scales_and_mins(blocks)
    return pairs(blocks[:, 16:], 32), scales, mins + 8 * scales


def _q5_k(blocks: Tensor) -> Parts:
    codes = fields(blocks[:, 48:], 32, 4) | fields(blocks[:, 16:48], 32, 1) << 4
    return codes.view(torch.int8), *_scales_and_mins(blocks)


def _q6_k(blocks: Tensor) -> Parts:
    codes = fields(blocks[:, :128], 64, 4) | fields(blocks[:, 128:192], 32, 2) << 4
    return codes.view(torch.int8) - 32, half(blocks, 208) * blocks[:, 192:208].view(torch.int8), None


def _iq4_nl(blocks: Tensor) -> Parts:
    return pairs(blocks[:, 2:], 16), half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Parts:
    groups = fields(blocks[:, 4:8], 1, 4) | fields(blocks[:, 2:4], 1, 2) << 4
    return pairs(blocks[:, 8:], 16), half(blocks, 0) * (groups.view(torch.int8) - 32), None


def _mxfp4(blocks: Tensor) -> Parts:
    return pairs(blocks[:, 1:], 16), power_of_two(blocks[:, :1]), None


BLOCK_TYPES: dict[int, BlockType] = {
    2: BlockType("Q4_0", 32, 18, WeightLayout("int4", 32), _q4_0, in_pairs=True),
    3: BlockType("Q4_1", 32, 20, WeightLayout("int4", 32, has_mins=True), _q4_1, in_pairs=True),
    6: BlockType("Q5_0", 32, 22, WeightLayout("int8", 32), _q5_0),
    7: BlockType("Q5_1", 32, 24, WeightLayout("int8", 32, has_mins=True), _q5_1),
    8: BlockType("Q8_0", 32, 34, WeightLayout("int8", 32), _q8_0),
    10: BlockType("Q2_K", 256, 84, WeightLayout("int4", 16, has_mins=True), _q2_k),
    11: BlockType("Q3_K", 256, 110, WeightLayout("int4", 16), _q3_k),
    12: BlockType("Q4_K", 256, 144, WeightLayout("int4", 32, has_mins=True), _q4_k, in_pairs=True),
    13: BlockType("Q5_K", 256, 176, WeightLayout("int8", 32, has_mins=True), _q5_k),
    14: BlockType("Q6_K", 256, 210, WeightLayout("int8", 16), _q6_k),
    20: BlockType("IQ4_NL", 32, 18, WeightLayout("int4", 32, codebook="iq4_nl"), _iq4_nl, in_pairs=True),
    23: BlockType("IQ4_XS", 256, 136, WeightLayout("int4", 32, codebook="iq4_nl"), _iq4_xs, in_pairs=True),
    39: BlockType("MXFP4", 32, 17, WeightLayout("int4", 32, codebook="mxfp4"), _mxfp4, in_pairs=True),
}
"""By ggml's number of the type."""

OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of the types that are not implemented."""
