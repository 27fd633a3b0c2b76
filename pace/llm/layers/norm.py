"""Normalisations, computed in the activations' dtype with float32 weights, and null objects for models without them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pace.llm.layers.base import Layer, Vectors
from pace.llm.layers.weight_target import TensorSource
from pace.ops.protocol import ForwardOps, WeightOps


class RMSNorm(Layer):
    """RMS norm: `x / sqrt(mean(x^2) + eps) * weight` over the last dimension; the checkpoint holds
    `weight - offset`."""

    def __init__(self, name: str, size: int, eps: float, offset: float = 0.0):
        self.weight = Vectors({f"{name}.weight": size}, offset=offset)
        self.eps = eps

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight.values, self.eps)


class UnitNorm(Layer):
    """The RMS norm of `x [T, K]`, without weights."""

    def __init__(self, size: int, eps: float):
        self.size = size
        self.eps = eps
        self.weight = Vectors({})
        self.ones: Tensor | None = None

    def allocate(self, ops: WeightOps, dtype: torch.dtype) -> None:
        self.ones = torch.ones(self.size, dtype=torch.promote_types(dtype, torch.float32))

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.ones, self.eps)


class LayerNorm(Layer):
    """Layer norm: `(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension; the checkpoint holds
    `weight - offset`. Without `affine`, it has no weight and no bias."""

    def __init__(self, name: str, size: int, eps: float, affine: bool = True, bias: bool = True, offset: float = 0.0):
        self.weight = Vectors({f"{name}.weight": size} if affine else {}, offset=offset)
        self.bias = Vectors({f"{name}.bias": size} if affine and bias else {})
        self.eps = eps

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight.values, self.bias.values, self.eps)


class GatedNorm(Layer):
    """The RMS norm of each of `groups` equal parts of a row of `x [T, K]`, with an activated gate `[T, K]`:
    `norm(x) * activation(gate)`, or `norm(x * activation(gate))` without `norm_first`.

    `size`: elements of the weight, either K or those of one part."""

    def __init__(
        self, name: str, size: int, eps: float, groups: int, activation: str = "silu", norm_first: bool = True
    ):
        self.weight = Vectors({f"{name}.weight": size})
        self.eps = eps
        self.groups = groups
        self.activation = activation
        self.norm_first = norm_first

    def __call__(self, ops: ForwardOps, x: Tensor, gate: Tensor) -> Tensor:
        return ops.gated_norm(x, gate, self.weight.values, self.eps, self.groups, self.activation, self.norm_first)


class LayerScale(Layer):
    """Multiplies column k of `x [T, K]` by element k of the tensor `name`, in place. It follows a branch, as a norm
    may."""

    def __init__(self, name: str, size: int):
        self.factors = Vectors({name: size})

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        ops.scale_(x, self.factors.values)
        return x


class NoNorm(Layer):
    """Returns x unchanged."""

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return x


class HeadNorm(RMSNorm):
    """The RMS norm of every head of `x [T, H, D]`, in place; x may be a strided view."""

    def __call__(self, ops: ForwardOps, x: Tensor) -> None:
        ops.head_rms_norm_(x, self.weight.values, self.eps)


class HeadUnitNorm(Layer):
    """The RMS norm of every head of `x [T, H, D]`, without weights, in place."""

    def __init__(self, head_dim: int, eps: float):
        self.ones = torch.ones(head_dim)
        self.eps = eps

    def __call__(self, ops: ForwardOps, x: Tensor) -> None:
        ops.head_rms_norm_(x, self.ones, self.eps)


class HeadLayerNorm(Layer):
    """The layer norm of every head of `x [T, H, D]` in place, with weights for each head and without biases."""

    def __init__(self, tensors: str | Sequence[str], num_heads: int, head_dim: int, eps: float):
        """`tensors`: the name of one `[H, D]`, or a sequence with the name of one `[D]` for each head."""
        if isinstance(tensors, str):
            self.weight = Vectors({tensors: num_heads * head_dim}, {tensors: TensorSource((num_heads, head_dim))})
        else:
            self.weight = Vectors(dict.fromkeys(tensors, head_dim))
        self.head_dim = head_dim
        self.eps = eps

    def __call__(self, ops: ForwardOps, x: Tensor) -> None:
        ops.head_layer_norm_(x, self.weight.values.view(-1, self.head_dim), None, self.eps)


class SharedHeadLayerNorm(LayerNorm):
    """The layer norm of every head of `x [T, H, D]` in place, with one weight and one bias for all heads."""

    def __call__(self, ops: ForwardOps, x: Tensor) -> None:
        ops.head_layer_norm_(x, self.weight.values, self.bias.values, self.eps)


class WholeNorm(RMSNorm):
    """The RMS norm over all heads of `x [T, H, D]` together, in place; the heads must be adjacent."""

    def __call__(self, ops: ForwardOps, x: Tensor) -> None:
        ops.head_rms_norm_(x.flatten(1).unflatten(1, (1, -1)), self.weight.values, self.eps)


class NoHeadNorm(Layer):
    """Leaves the heads unchanged."""

    def __call__(self, ops: ForwardOps, x: Tensor) -> None:
        pass
