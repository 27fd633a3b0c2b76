"""RMSNorm and LayerNorm on the C++ kernels (csrc/kernels/norm.inl): checks, then one call. Activations are float32."""

from __future__ import annotations

import torch
from torch import Tensor

from pace import _C
from pace.ops.checks import check_head_weights, check_heads, check_rows, check_vector


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `[T, K]`: `x / sqrt(mean(x^2) + eps) * weight [K]`; x may have any row stride.

    Numerics: fp32; the order of summation depends only on K and the instruction set."""
    return _norm(False, x, weight, None, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Returns `[T, K]`: `(x - mean(x)) / sqrt(var(x) + eps) * weight [K] + bias [K]`; x may have any row stride.

    Numerics: as in `rms_norm`; the variance is computed around the mean, in a second pass."""
    return _norm(True, x, weight, bias, eps)


def head_rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Applies `rms_norm` to every head of `x [T, H, D]` with one `weight [D]`, in place; x may be a strided view."""
    tokens, heads, head_dim = check_heads("x", x)
    weight_address = check_vector("weight", weight, head_dim)
    _C.head_norm(False, x.data_ptr(), tokens, heads, head_dim, x.stride(0), x.stride(1), weight_address, 0, eps)


def head_layer_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Applies `layer_norm` to every head of `x [T, H, D]` with `weight [H, D]`, in place; x may be a strided view."""
    tokens, heads, head_dim = check_heads("x", x)
    weight_address = check_head_weights(weight, heads, head_dim)
    _C.head_norm(True, x.data_ptr(), tokens, heads, head_dim, x.stride(0), x.stride(1), weight_address, head_dim, eps)


def _norm(layer: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    rows, k = check_rows("x", x)
    y = torch.empty(rows, k)
    _C.norm(
        layer,
        x.data_ptr(),
        x.stride(0),
        0 if weight is None else check_vector("weight", weight, k),
        0 if bias is None else check_vector("bias", bias, k),
        eps,
        rows,
        k,
        y.data_ptr(),
    )
    return y
