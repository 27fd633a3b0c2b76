"""Embedding, matrix products and activations on the C++ kernels: checks, then one call. Activations are float32."""

from __future__ import annotations

import torch
from torch import Tensor

from pace import _C
from pace.ops.checks import check_rows, describe
from pace.ops.experts import Activation
from pace.ops.file_table import RowTable
from pace.ops.weight import PackedWeight


def embedding(ids: Tensor, weight: PackedWeight | RowTable) -> Tensor:
    if ids.dtype != torch.int64 or ids.ndim != 1:
        raise TypeError(f"ids must be a vector of int64; got {ids.dtype} of shape {tuple(ids.shape)}")
    if isinstance(weight, RowTable):
        return weight.rows(ids).float()
    out = torch.empty(len(ids), weight.k)
    _C.gather_rows(weight, ids.contiguous(), len(ids), out, True)
    return out


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Numerics: fp32 accumulation in ascending k. If the instruction set multiplies bf16 pairs and the weight is bf16,
    x is rounded to bf16 first. For integer codes, x is quantised to int8 in groups, and products of a group are exact
    (csrc/kernels/linear_quantized.inl). A row's result does not depend on the other rows (csrc/kernels/linear.inl)."""
    return _product(x, weight, bias, activation, residual, weight.n)


def linear_glu(x: Tensor, weight: PackedWeight, activation: str, bias: Tensor | None = None) -> Tensor:
    """Numerics: as in `linear`."""
    if not weight.glu:
        raise ValueError(
            "linear_glu needs a weight made with glu=True, whose rows are [gate; up]; use linear for others"
        )
    return _product(x, weight, bias, activation, None, weight.n_out)


def activation(x: Tensor, activation: Activation) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"activations are float32; got {x.dtype}")
    x = x.contiguous()
    out, k = torch.empty_like(x), x.shape[-1] if x.ndim else 1
    _C.activation(activation, x.view(x.numel() // max(1, k), k), out)
    return out


def glu(x: Tensor, activation: str) -> Tensor:
    rows, columns = check_rows("x", x)
    if columns % 2:
        raise ValueError(f"x must be float32 [T, 2 K], gate and up; got {describe(x)}")
    out = torch.empty(rows, columns // 2)
    _C.glu(activation, x, out)
    return out


def _product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: Activation | None,
    residual: Tensor | None,
    num_columns: int,
) -> Tensor:
    rows, columns = check_rows("x", x)
    if columns != weight.k:
        raise ValueError(f"x must be float32 [T, {weight.k}] with contiguous rows; got {describe(x)}")
    out = torch.empty(rows, num_columns)
    for name, tensor, shape in (("bias", bias, (weight.n,)), ("residual", residual, out.shape)):
        if tensor is not None and (
            tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous()
        ):
            raise ValueError(f"{name} must be contiguous float32 {list(shape)}; got {describe(tensor)}")
    _C.linear(x, weight, bias, activation, residual, out, weight.glu and num_columns == weight.n)
    return out
