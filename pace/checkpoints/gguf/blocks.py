"""The block types of ggml, in which GGUF files hold matrices: bytes of blocks to codes, scales and minima.

A row is a sequence of blocks of 32 or 256 weights; the types are described by ggml's structs (ggml/src/ggml-common.h)
and their `dequantize_row_*` (ggml/src/ggml-quants.c). Each has a layout that holds the same numbers in as many bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pace.ops.kernels.quantize import add_fields_, unpack_fields
from pace.ops.weight_layout import SUPER_GROUPS, QuantizedRows, WeightLayout
from pace.quant.format import power_of_two

Parts = dict[str, Tensor]
"""Fields of `QuantizedRows`, each `[blocks, numbers of a block]`."""


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

    def row_bytes(self, k: int) -> int:
        """Of a row of k weights; ValueError where these are no whole blocks."""
        if k % self.weights:
            raise ValueError(f"rows of {k} weights are no whole number of {self.name} blocks of {self.weights}")
        return k // self.weights * self.nbytes

    def decode(self, rows: Tensor) -> QuantizedRows:
        """The rows in uint8 `[rows, row_bytes(k)]`."""
        num_rows, per_row = rows.shape[0], rows.shape[1] // self.nbytes
        parts = self.parts(rows.reshape(-1, self.nbytes))
        return QuantizedRows(
            self.layout, **{name: part.reshape(num_rows, per_row * part.shape[1]) for name, part in parts.items()}
        )


def half(blocks: Tensor, byte: int) -> Tensor:
    """The float16 number at `byte` of each block, `[blocks, 1]`."""
    return blocks[:, byte : byte + 2].contiguous().view(torch.float16)


def _q4_0(blocks: Tensor) -> Parts:
    return {"codes": unpack_fields(blocks[:, 2:], 16, 4), "scales": half(blocks, 0).float()}


def _q4_1(blocks: Tensor) -> Parts:
    scales, mins = half(blocks, 0).float(), half(blocks, 2).float()
    return {"codes": unpack_fields(blocks[:, 4:], 16, 4), "scales": scales, "mins": mins}


def _with_high(codes: Tensor, packed: Tensor, run: int, bits: int, shift: int) -> Tensor:
    add_fields_(codes, packed, run, bits, shift)
    return codes


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    return _with_high(unpack_fields(low, 16, 4), high, 1, 1, 4)


def _q5_0(blocks: Tensor) -> Parts:
    return {"codes": _five_bits(blocks[:, 2:6], blocks[:, 6:]), "scales": half(blocks, 0).float()}


def _q5_1(blocks: Tensor) -> Parts:
    scales, mins = half(blocks, 0).float(), half(blocks, 2).float()
    return {"codes": _five_bits(blocks[:, 4:8], blocks[:, 8:]), "scales": scales, "mins": mins}


def _q8_0(blocks: Tensor) -> Parts:
    return {"codes": blocks[:, 2:].view(torch.int8), "scales": half(blocks, 0).float()}


def _q2_k(blocks: Tensor) -> Parts:
    groups = blocks[:, :16].view(torch.int8)
    return {
        "codes": unpack_fields(blocks[:, 16:80], 32, 2),
        "scales": groups & 15,
        "mins": groups >> 4 & 15,
        "super_scales": half(blocks, 80),
        "super_mins": -half(blocks, 82),
    }


def _q3_k(blocks: Tensor) -> Parts:
    codes = _with_high(unpack_fields(blocks[:, 32:96], 32, 2), blocks[:, :32], 32, 1, 2)
    groups = _with_high(unpack_fields(blocks[:, 96:104], 8, 4), blocks[:, 104:108], 4, 2, 4)
    return {
        "codes": codes,
        "scales": groups.view(torch.int8) - 32,
        "super_scales": half(blocks, 108),
    }


def _scales_and_mins(blocks: Tensor) -> Parts:
    """Of Q4_K and Q5_K, which begin alike: two float16 numbers, and for each of 8 groups 6 bits of a scale and 6 of a
    minimum."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    return {
        "scales": torch.cat([first & 63, third & 15 | first >> 6 << 4], 1).view(torch.int8),
        "mins": torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1).view(torch.int8),
        "super_scales": half(blocks, 0),
        "super_mins": -half(blocks, 2),
    }


def _q4_k(blocks: Tensor) -> Parts:
    return {"codes": unpack_fields(blocks[:, 16:], 32, 4), **_scales_and_mins(blocks)}


def _q5_k(blocks: Tensor) -> Parts:
    codes = _with_high(unpack_fields(blocks[:, 48:], 32, 4), blocks[:, 16:48], 32, 1, 4)
    return {"codes": codes, **_scales_and_mins(blocks)}


def _q6_k(blocks: Tensor) -> Parts:
    codes = _with_high(unpack_fields(blocks[:, :128], 64, 4), blocks[:, 128:192], 32, 2, 4)
    return {"codes": codes, "scales": blocks[:, 192:208].view(torch.int8), "super_scales": half(blocks, 208)}


def _iq4_nl(blocks: Tensor) -> Parts:
    return _q4_0(blocks)


def _iq4_xs(blocks: Tensor) -> Parts:
    groups = _with_high(unpack_fields(blocks[:, 4:8], 1, 4), blocks[:, 2:4], 1, 2, 4)
    return {
        "codes": unpack_fields(blocks[:, 8:], 16, 4),
        "scales": groups.view(torch.int8) - 32,
        "super_scales": half(blocks, 0),
    }


def _mxfp4(blocks: Tensor) -> Parts:
    return {"codes": unpack_fields(blocks[:, 1:], 16, 4), "scales": power_of_two(blocks[:, :1])}


def _super(code: str, scale_bits: int, has_mins: bool = False, codebook: str | None = None) -> WeightLayout:
    """Codes with minima stand for themselves."""
    return WeightLayout(code, SUPER_GROUPS[code], has_mins, codebook, 0 if has_mins else None, scale_bits)


BLOCK_TYPES: dict[int, BlockType] = {
    2: BlockType("Q4_0", 32, 18, WeightLayout("int4", 32), _q4_0),
    3: BlockType("Q4_1", 32, 20, WeightLayout("int4", 32, has_mins=True, offset=0), _q4_1),
    6: BlockType("Q5_0", 32, 22, WeightLayout("int5", 32), _q5_0),
    7: BlockType("Q5_1", 32, 24, WeightLayout("int5", 32, has_mins=True, offset=0), _q5_1),
    8: BlockType("Q8_0", 32, 34, WeightLayout("int8", 32), _q8_0),
    10: BlockType("Q2_K", 256, 84, _super("int2", 4, has_mins=True), _q2_k),
    11: BlockType("Q3_K", 256, 110, _super("int3", 6), _q3_k),
    12: BlockType("Q4_K", 256, 144, _super("int4", 6, has_mins=True), _q4_k),
    13: BlockType("Q5_K", 256, 176, _super("int5", 6, has_mins=True), _q5_k),
    14: BlockType("Q6_K", 256, 210, _super("int6", 8), _q6_k),
    20: BlockType("IQ4_NL", 32, 18, WeightLayout("int4", 32, codebook="iq4_nl"), _iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, _super("int4", 6, codebook="iq4_nl"), _iq4_xs),
    39: BlockType("MXFP4", 32, 17, WeightLayout("int4", 32, codebook="mxfp4"), _mxfp4),
}
"""By ggml's number of the type."""

FILE_TYPES = {
    2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 21: "Q2_K_S", 25: "IQ4_NL", 30: "IQ4_XS",
    38: "MXFP4_MOE",
}  # fmt: skip
"""Names of mixtures of these types, by general.file_type (llama_ftype in include/llama.h of llama.cpp)."""

OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of the types that are not implemented."""
