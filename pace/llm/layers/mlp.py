"""The two feed-forward forms: gated (gate * up, then down) and plain (one activation between two products)."""

from __future__ import annotations

from torch import Tensor

from pace.llm.layers.base import Layer
from pace.llm.layers.linear import GatedLinear, Linear
from pace.ops.protocol import ForwardOps


class GatedMLP(Layer):
    """`residual + down(act(gate(x)) * up(x))`."""

    operator = "mlp"

    def __init__(self, gate_up: GatedLinear, down: Linear, activation: str):
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    @property
    def readers(self) -> list[Linear]:
        return [self.gate_up]

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.down(ops, self.gate_up(ops, x, self.activation), residual=residual)


class ScaledMLP(GatedMLP):
    """`residual + scale * down(act(gate(x)) * up(x))`."""

    def __init__(self, gate_up: GatedLinear, down: Linear, activation: str, scale: float):
        super().__init__(gate_up, down, activation)
        self.scale = scale

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor) -> Tensor:
        y = super().__call__(ops, x)
        ops.scale_(y, self.scale)
        return residual + y


class PlainMLP(Layer):
    """`residual + down(act(up(x)))`."""

    operator = "mlp"

    def __init__(self, up: Linear, down: Linear, activation: str):
        self.up = up
        self.down = down
        self.activation = activation

    @property
    def readers(self) -> list[Linear]:
        return [self.up]

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.down(ops, self.up(ops, x, self.activation), residual=residual)
