"""Elementwise operations on a matrix, in place, on the C++ kernels. Activations are float32."""

from __future__ import annotations

import math

from torch import Tensor

from pace import _C
from pace.ops.checks import check_rows


def scale_(x: Tensor, factor: float) -> None:
    if not math.isfinite(factor):
        raise ValueError(f"factor must be finite; got {factor}")
    check_rows("x", x)
    _C.scale(x, factor)


def softcap_(x: Tensor, cap: float) -> None:
    if not 0 < cap < math.inf:
        raise ValueError(f"cap must be positive and finite; got {cap}")
    check_rows("x", x)
    _C.softcap(x, cap)
