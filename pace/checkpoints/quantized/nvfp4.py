"""NVFP4: floats of 4 bits (E2M1) in groups of 16, whose scale is a float8 (E4M3) times one number for the matrix.

    compressed-tensors   weight_packed uint8 [N, K / 2]     ModelOpt   weight
                         weight_scale e4m3 [N, K / 16]                 weight_scale
                         weight_global_scale fp32 [1]                  weight_scale_2, its inverse

    W[n, k] = E2M1(code[n, k]) * weight_scale[n, k // 16] / weight_global_scale

Two codes are in a byte, the first in the low bits. Scales of activations are not used.

Source: the code of compressed-tensors and of vLLM, which reads both"""

from __future__ import annotations

import torch

from pace.checkpoints.quantized.stored import StoredMatrix, StoredTensors
from pace.ops.weight_layout import QuantizedRows, WeightLayout

GROUP = 16


class NVFP4Matrix(StoredMatrix):
    by_rows = ("codes", "scales")
    dtype = WeightLayout("int4", GROUP, codebook="mxfp4")

    def __init__(self, source: StoredTensors, module: str, codes: str, factor: str, divides: bool):
        """`factor`: suffix of the matrix's own number, which divides the scales or multiplies them."""
        super().__init__(source, module, {"codes": codes, "scales": ".weight_scale", "factor": factor})
        rows, groups = self.expect("scales", (torch.float8_e4m3fn,), (-1, -1))
        self.expect("codes", (torch.uint8,), (rows, groups * GROUP // 2))
        self.expect("factor", (torch.float32,), (), (1,))
        self.shape = (rows, groups * GROUP)
        value = self.finite("factor", self.stored("factor")).reshape(())
        if value <= 0:
            raise ValueError(f"tensor {self.parts['factor']!r} must be positive; got {value.item()}")
        self._value, self._divides = value, divides

    def read(self, start: int, stop: int) -> QuantizedRows:
        scales = self.rows("scales", start, stop).float()
        scales = self.finite("scales", scales / self._value if self._divides else scales * self._value)
        return QuantizedRows(self.dtype, self.rows("codes", start, stop), scales, paired_k=self.shape[-1])
