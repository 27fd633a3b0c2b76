"""Embedding, matrix products and activations on the C++ kernels: checks, then one call. Activations are float32."""

from __future__ import annotations

import torch
from torch import Tensor

from pace import _C
from pace.ops.weight import PackedWeight

# Numbers of Activation in csrc/include/pace/types.h. `gelu_new`, `gelu_tanh` and `gelu_fast` are the same function.
ACTIVATION_CODES = {
    None: 0,
    "silu": 1,
    "gelu": 2,
    "gelu_new": 3,
    "gelu_tanh": 3,
    "gelu_fast": 3,
    "quick_gelu": 4,
    "relu": 5,
}


def embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Returns `[T, K]`: row `ids[t]` of the weight, widened to float32. Raises ValueError for ids out of range."""
    if ids.dtype != torch.int64 or ids.ndim != 1:
        raise TypeError(f"ids must be a vector of int64; got {ids.dtype} of shape {tuple(ids.shape)}")
    ids = ids.contiguous()
    out = torch.empty(ids.shape[0], weight.k)
    _C.gather_rows(weight.address, weight.order_address, ids.data_ptr(), ids.shape[0], out.data_ptr(), True)
    return out


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Returns `[T, N]`: `residual [T, N] + activation(x [T, K] W' + bias [N])`; bias, activation and residual are
    optional.

    x may have any row stride. Numerics: fp32 accumulation in ascending k. If the instruction set multiplies bf16 pairs
    and the weight is bf16, x is rounded to bf16 first. For integer codes, x is quantised to int8 in groups, and
    products of a group are exact (csrc/kernels/linear_quantized.inl). A row's result does not depend on the other rows
    (csrc/kernels/linear.inl)."""
    if weight.glu:
        raise ValueError("this weight holds gate and up rows; use linear_glu")
    rows = _check_input(x, weight)
    out = torch.empty(rows, weight.n)
    if residual is not None and (residual.shape != out.shape or not _is_plain(residual)):
        raise ValueError(f"residual must be contiguous float32 {tuple(out.shape)}; got {_describe(residual)}")
    _C.linear(
        x.data_ptr(),
        x.stride(0),
        rows,
        weight.address,
        weight.order_address,
        0 if bias is None else _check_bias(bias, weight),
        activation_code(activation),
        0 if residual is None else residual.data_ptr(),
        out.data_ptr(),
    )
    return out


def linear_glu(x: Tensor, weight: PackedWeight, activation: str, bias: Tensor | None = None) -> Tensor:
    """Returns `[T, N / 2]`: `activation(x Wg' + bg) * (x Wu' + bu)`. The rows of the weight (and of `bias [N]`) are
    `[gate; up]`.

    Numerics as in `linear`."""
    if not weight.glu:
        raise ValueError(
            "linear_glu needs a weight made with glu=True, whose rows are [gate; up]; use linear for others"
        )
    rows = _check_input(x, weight)
    out = torch.empty(rows, weight.n_out)
    bias_address = 0 if bias is None else _check_bias(bias, weight)
    code = activation_code(activation)
    _C.linear(
        x.data_ptr(), x.stride(0), rows, weight.address, weight.order_address, bias_address, code, 0, out.data_ptr()
    )
    return out


def activation(x: Tensor, name: str) -> Tensor:
    """Returns a new tensor: the activation `name` (a key of `ACTIVATION_CODES`) of every element of x."""
    if x.dtype != torch.float32:
        raise TypeError(f"activations are float32; got {x.dtype}")
    x = x.contiguous()
    out = torch.empty_like(x)
    k = x.shape[-1] if x.ndim else 1
    _C.activation(activation_code(name), x.data_ptr(), x.numel() // max(1, k), k, out.data_ptr())
    return out


def _check_input(x: Tensor, weight: PackedWeight) -> int:
    """Returns the number of rows of x. Raises ValueError unless x is float32 `[T, weight.k]` with contiguous rows."""
    if x.dtype != torch.float32 or x.ndim != 2 or x.shape[1] != weight.k or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(f"x must be float32 [T, {weight.k}] with contiguous rows; got {_describe(x)}")
    return x.shape[0]


def _check_bias(bias: Tensor, weight: PackedWeight) -> int:
    if bias.ndim != 1 or bias.shape[0] != weight.n or not _is_plain(bias):
        raise ValueError(f"bias must be contiguous float32 [{weight.n}]; got {_describe(bias)}")
    return bias.data_ptr()


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"


def activation_code(name: str | None) -> int:
    try:
        return ACTIVATION_CODES[name]
    except KeyError:
        names = ", ".join(key for key in ACTIVATION_CODES if key)
        raise ValueError(f"unknown activation {name!r}; known: {names}") from None
