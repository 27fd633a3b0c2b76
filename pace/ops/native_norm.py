"""RMSNorm and LayerNorm on the C++ kernels (csrc/kernels/norm.inl): checks, then one call. Activations are float32."""

from __future__ import annotations

import torch
from torch import Tensor

from pace import _C
from pace.ops.checks import check_heads, check_rows, check_same_shape, check_vector


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """`y [T, K] = s / sqrt(mean(s^2) + eps) * weight [K]` with `s = x`; given a residual, `s = x + residual` and
    `(y, s)`.

    x may have any row stride. Numerics: fp32, an order of summation that depends on K and the instruction set alone."""
    return _norm(False, x, weight, None, eps, residual)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`y [T, K] = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias`, population variance; residual as in
    `rms_norm`."""
    return _norm(True, x, weight, bias, eps, residual)


def head_rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """`rms_norm` of every head of `x [T, H, D]` with one `weight [D]`, in place; x may be a strided view."""
    tokens, heads, head_dim = check_heads("x", x)
    weight_address = check_vector("weight", weight, head_dim)
    _C.head_rms_norm(x.data_ptr(), tokens, heads, head_dim, x.stride(0), x.stride(1), weight_address, eps)


def _norm(
    layer: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    rows, k = check_rows("x", x)
    y = torch.empty(rows, k)
    total = None if residual is None else torch.empty(rows, k)
    _C.norm(
        layer,
        x.data_ptr(),
        x.stride(0),
        0 if residual is None else check_same_shape("residual", residual, y),
        0 if weight is None else check_vector("weight", weight, k),
        0 if bias is None else check_vector("bias", bias, k),
        eps,
        rows,
        k,
        0 if total is None else total.data_ptr(),
        y.data_ptr(),
    )
    return y if total is None else (y, total)
