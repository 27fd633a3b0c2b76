"""RMSNorm and LayerNorm on the C++ kernels (csrc/kernels/norm.inl): checks, then one call. Activations are float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pace import _C
from pace.ops.checks import check_head_weights, check_heads, check_rows, check_vector, describe


@dataclass(frozen=True, eq=False)
class NormParameters:
    """A norm of rows or of heads."""

    kind: str
    """"rms" or "layer"."""
    weight: Tensor | None
    """`[K]`; for a norm of heads `[D]` or `[H, D]`."""
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, eq=False)
class GatedNormParameters:
    """A norm over parts of a row, and a gate."""

    weight: Tensor
    """`[K]`, or the elements of one part."""
    weight_stride: int
    """Elements between the weights of neighbouring parts; 0 if all share them."""
    eps: float
    groups: int
    activation: str
    norm_first: bool


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Numerics: fp32; the order of summation depends only on K and the instruction set."""
    return _norm(x, NormParameters("rms", weight, None, eps))


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Numerics: as in `rms_norm`; the variance is computed around the mean, in a second pass."""
    return _norm(x, NormParameters("layer", weight, bias, eps))


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, activation: str, norm_first: bool
) -> Tensor:
    """Numerics: as in `rms_norm`, for each part of a row."""
    rows, k = check_rows("x", x)
    if check_rows("gate", gate) != (rows, k):
        raise ValueError(f"gate must be float32 [{rows}, {k}], as x; got {describe(gate)}")
    y = torch.empty(rows, k)
    _C.gated_norm(x, gate, gated_norm_parameters(k, weight, eps, groups, activation, norm_first), y)
    return y


def gated_norm_parameters(
    columns: int, weight: Tensor, eps: float, groups: int, activation: str, norm_first: bool
) -> GatedNormParameters:
    """Checks the parameters of a `gated_norm` of this many columns. Raises ValueError."""
    if groups < 1 or columns % groups:
        raise ValueError(f"groups must divide the {columns} columns of x; got {groups}")
    width = columns // groups
    is_shared = len(weight) == width
    check_vector("weight", weight, width if is_shared else columns)
    return GatedNormParameters(weight, 0 if is_shared else width, eps, groups, activation, norm_first)


def head_rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    _, _, head_dim = check_heads("x", x)
    check_vector("weight", weight, head_dim)
    _C.head_norm(x, NormParameters("rms", weight, None, eps))


def head_layer_norm_(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    _, heads, head_dim = check_heads("x", x)
    _C.head_norm(x, head_layer_norm_parameters(heads, head_dim, weight, bias, eps))


def head_layer_norm_parameters(
    heads: int, head_dim: int, weight: Tensor, bias: Tensor | None, eps: float
) -> NormParameters:
    """Checks the parameters of a `head_layer_norm_`. Raises ValueError."""
    check_head_weights(weight, heads, head_dim)
    if bias is not None:
        check_vector("bias", bias, head_dim)
    return NormParameters("layer", weight, bias, eps)


def _norm(x: Tensor, norm: NormParameters) -> Tensor:
    rows, k = check_rows("x", x)
    for name, vector in (("weight", norm.weight), ("bias", norm.bias)):
        if vector is not None:
            check_vector(name, vector, k)
    y = torch.empty(rows, k)
    _C.norm(x, norm, y)
    return y
