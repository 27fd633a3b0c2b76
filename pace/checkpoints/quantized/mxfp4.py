"""MXFP4: 4-bit floats (E2M1) in blocks of 32 with a power-of-two scale (OCP Microscaling Formats 1.0), as in gpt-oss.

    weight_blocks uint8 [N, K / 32, 16]    two codes a byte, the first in the low bits; or `{module}_blocks`,
                                           or [N, K / 2]

    weight_scales uint8 [N, K / 32]        W[n, k] = E2M1(code[n, k]) * 2^(scale[n, k // 32] - 127)

The matrices of all experts may be one tensor, [E, N, ...]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.checkpoints.quantized.fp8 import EXPONENTS
from pace.checkpoints.quantized.method import Method, modules_with
from pace.checkpoints.quantized.stored import StoredMatrix, StoredTensors
from pace.ops.weight_layout import QuantizedRows, WeightLayout
from pace.quant.format import power_of_two

BLOCK = 32


@dataclass(frozen=True)
class MXFP4(Method):
    name: ClassVar[str] = "MXFP4"

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> MXFP4:
        return cls()

    def matrices(self, source: StoredTensors) -> Iterator[MXFP4Matrix]:
        for stem in modules_with(source, "_blocks"):
            module = stem.removesuffix(".weight")
            infix = stem.removeprefix(module)
            yield MXFP4Matrix(source, module, f"{infix}_blocks", f"{infix}_scales")


class MXFP4Matrix(StoredMatrix):
    by_rows = ("codes", "scales")
    dtype = WeightLayout("int4", BLOCK, codebook="mxfp4")

    def __init__(self, source: StoredTensors, module: str, codes: str, scales: str):
        super().__init__(source, module, {"codes": codes, "scales": scales})
        *stack, blocks = self.expect("scales", EXPONENTS, (-1, -1), (-1, -1, -1))
        self.expect("codes", (torch.uint8,), (*stack, blocks, BLOCK // 2), (*stack, blocks * BLOCK // 2))
        self.shape = (*stack, blocks * BLOCK)

    def read(self, start: int, stop: int) -> QuantizedRows:
        scales = self.finite("scales", power_of_two(self.rows("scales", start, stop)))
        codes = self.rows("codes", start, stop).flatten(1)
        return QuantizedRows(self.dtype, codes, scales, paired_k=self.shape[-1])
