"""Quantises rows of floats to codes and scales on the C++ kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from pace import _C
from pace.ops.quantizer import Quantizer
from pace.ops.weight import DTYPE_CODES
from pace.ops.weight_layout import CODES, SUPER_BLOCK, QuantizedRows

# Numbers of Quantizer in csrc/include/pace/types.h.
QUANTIZER_CODES = {"int8": 0, "int4": 1, "affine int4": 2, "codebook": 3, "mxfp4": 4, "mxfp8": 5, "fp8": 6}
QUANTIZER_CODES |= {"q2_k": 7, "q3_k": 8, "q4_k": 9, "q5_k": 10, "q6_k": 11}


def quantize(rows: Tensor, format: Quantizer, name: str = "the matrix") -> QuantizedRows:
    """int4 codes are paired if the format has a kernel."""
    layout, kernel, (num_rows, k) = format.layout, format.kernel, rows.shape
    if kernel is None or (layout.in_super_blocks and k % SUPER_BLOCK):
        return format.quantize(rows, name)
    source = rows if rows.dtype in DTYPE_CODES else rows.float()
    if source.stride(1) != 1 and k > 1:
        source = source.contiguous()
    paired = layout.code == "int4"
    codes = torch.empty(num_rows, -(-k // 2) if paired else k, dtype=CODES[layout.code])
    scales = torch.empty(num_rows, layout.num_groups(k), dtype=torch.int8 if layout.in_super_blocks else torch.float32)
    mins = torch.empty_like(scales) if layout.has_mins else None
    blocks = (num_rows, k // SUPER_BLOCK)
    super_scales = torch.empty(blocks, dtype=torch.float16) if layout.in_super_blocks else None
    super_mins = torch.empty_like(super_scales) if layout.in_super_blocks and layout.has_mins else None
    all_finite = _C.quantize_rows(
        QUANTIZER_CODES[kernel.name],
        source.data_ptr(),
        DTYPE_CODES[source.dtype],
        source.stride(0),
        num_rows,
        k,
        layout.group or k,
        kernel.gives_final_scales and layout.group is not None and not layout.in_super_blocks,
        0 if kernel.bounds is None else kernel.bounds.data_ptr(),
        0 if kernel.bounds is None else len(kernel.bounds),
        0 if kernel.code_of_level is None else kernel.code_of_level.data_ptr(),
        codes.data_ptr(),
        paired,
        scales.data_ptr(),
        *(0 if part is None else part.data_ptr() for part in (mins, super_scales, super_mins)),
    )
    if not all_finite:
        return format.quantize(rows, name)  # raises, and says where
    if not kernel.gives_final_scales:
        scales = format.final_scales(scales)
    paired_k = k if paired else None
    return QuantizedRows(
        layout, codes, scales, mins, paired_k=paired_k, super_scales=super_scales, super_mins=super_mins
    )
