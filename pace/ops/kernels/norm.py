"""RMSNorm and LayerNorm on the C++ kernels (csrc/kernels/norm.inl): checks, then one call. Activations are float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pace import _C
from pace.ops.checks import check_head_weights, check_heads, check_rows, check_vector


@dataclass(frozen=True, eq=False)
class NormParameters:
    """A norm of rows or of heads."""

    kind: str
    """"rms" or "layer"."""
    weight: Tensor | None
    """`[K]`; for a norm of heads `[D]` or `[H, D]`."""
    bias: Tensor | None
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Numerics: fp32; the order of summation depends only on K and the instruction set."""
    return _norm(x, NormParameters("rms", weight, None, eps))


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Numerics: as in `rms_norm`; the variance is computed around the mean, in a second pass."""
    return _norm(x, NormParameters("layer", weight, bias, eps))


def head_rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    _, _, head_dim = check_heads("x", x)
    check_vector("weight", weight, head_dim)
    _C.head_norm(x, NormParameters("rms", weight, None, eps))


def head_layer_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    _, heads, head_dim = check_heads("x", x)
    check_head_weights(weight, heads, head_dim)
    _C.head_norm(x, NormParameters("layer", weight, None, eps))


def _norm(x: Tensor, norm: NormParameters) -> Tensor:
    rows, k = check_rows("x", x)
    for name, vector in (("weight", norm.weight), ("bias", norm.bias)):
        if vector is not None:
            check_vector(name, vector, k)
    y = torch.empty(rows, k)
    _C.norm(x, norm, y)
    return y
