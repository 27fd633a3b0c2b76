"""Normalisations, computed in the activations' dtype with float32 weights. Null objects stand where a model has
none."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from pace.llm.layers.base import Layer, Vectors


class RMSNorm(Layer):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; the checkpoint holds `weight - offset`."""

    def __init__(self, name: str, size: int, eps: float, offset: float = 0.0):
        self.weight = Vectors({f"{name}.weight": size}, offset=offset)
        self.eps = eps

    def __call__(self, ops: ModuleType, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight.values, self.eps)


class LayerNorm(Layer):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension; without `affine`, no weight and no
    bias."""

    def __init__(self, name: str, size: int, eps: float, affine: bool = True):
        self.weight = Vectors({f"{name}.weight": size} if affine else {})
        self.bias = Vectors({f"{name}.bias": size} if affine else {})
        self.eps = eps

    def __call__(self, ops: ModuleType, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight.values, self.bias.values, self.eps)


class NoNorm(Layer):
    """Leaves x as it is."""

    def __call__(self, ops: ModuleType, x: Tensor) -> Tensor:
        return x


class HeadNorm(RMSNorm):
    """The RMS norm of every head of `x [T, H, D]`, in place; x may be a strided view."""

    def __call__(self, ops: ModuleType, x: Tensor) -> None:
        ops.head_rms_norm_(x, self.weight.values, self.eps)


class NoHeadNorm(Layer):
    """Leaves the heads as they are."""

    def __call__(self, ops: ModuleType, x: Tensor) -> None:
        pass
