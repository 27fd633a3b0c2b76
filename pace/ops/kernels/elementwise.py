"""Elementwise operations on a matrix, in place, on the C++ kernels. Activations are float32."""

from __future__ import annotations

import math

from torch import Tensor

from pace import _C
from pace.ops.checks import check_rows


def scale_(x: Tensor, factor: float) -> None:
    """Multiplies `x [T, K]` by a number, rounded to float32, in place (`ForwardOps.scale_`)."""
    if not math.isfinite(factor):
        raise ValueError(f"factor must be finite; got {factor}")
    rows, k = check_rows("x", x)
    _C.scale(x.data_ptr(), x.stride(0), rows, k, factor)


def softcap_(x: Tensor, cap: float) -> None:
    """Computes `x [T, K] = cap * tanh(x / cap)` in place (`ForwardOps.softcap_`)."""
    if not 0 < cap < math.inf:
        raise ValueError(f"cap must be positive and finite; got {cap}")
    rows, k = check_rows("x", x)
    _C.softcap(x.data_ptr(), x.stride(0), rows, k, cap)
