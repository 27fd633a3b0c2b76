"""MXFP6: floats of 6 bits (E2M3) in blocks of 32 with a power-of-two scale (OCP Microscaling Formats 1.0).

    weight_packed uint8 [N, 3 K / 4]    four codes in three bytes, the first in the lowest bits

    weight_scale  uint8 [N, K / 32]     W[n, k] = E2M3(code[n, k]) * 2^(scale[n, k // 32] - 127)

Every E2M3 number is also an E4M3 number, and is stored as one: the values are exact, in 8 bits.

Source: the code of compressed-tensors"""

from __future__ import annotations

import torch

from pace.checkpoints.quantized.fp8 import EXPONENTS
from pace.checkpoints.quantized.stored import StoredMatrix, StoredTensors, unpack
from pace.ops.weight_layout import QuantizedRows, WeightLayout
from pace.quant.format import power_of_two

BLOCK = 32
BLOCK_BYTES = BLOCK * 6 // 8


def _e2m3() -> torch.Tensor:
    """The numbers of codes 0 .. 63: sign, two bits of exponent with bias 1, three of mantissa."""
    code = torch.arange(32)
    exponent, mantissa = code >> 3, (code & 7) / 8
    values = torch.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1))
    return torch.cat([values, -values])


E2M3_AS_E4M3 = _e2m3().to(torch.float8_e4m3fn).view(torch.uint8)


class MXFP6Matrix(StoredMatrix):
    by_rows = ("codes", "scales")
    dtype = WeightLayout("float8", BLOCK)

    def __init__(self, source: StoredTensors, module: str):
        super().__init__(source, module, {"codes": ".weight_packed", "scales": ".weight_scale"})
        rows, blocks = self.expect("scales", EXPONENTS, (-1, -1))
        self.expect("codes", (torch.uint8,), (rows, blocks * BLOCK_BYTES))
        self.shape = (rows, blocks * BLOCK)

    def read(self, start: int, stop: int) -> QuantizedRows:
        scales = self.finite("scales", power_of_two(self.rows("scales", start, stop)))
        codes = unpack(self.rows("codes", start, stop), 6)
        return QuantizedRows(self.dtype, E2M3_AS_E4M3[codes.int()], scales)
