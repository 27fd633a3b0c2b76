"""The two feed-forward forms: gated (gate * up, then down) and plain (one activation between two products). The
activation of a plain one may have its numbers in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pace.llm.layers.base import Layer, Vectors
from pace.llm.layers.linear import GatedLinear, Linear
from pace.llm.layers.weight_target import TensorSource
from pace.ops.experts import Activation, Xielu
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

    def __init__(self, up: Linear, down: Linear, activation: Activation):
        self.up = up
        self.down = down
        self.activation = activation

    @classmethod
    def named(cls, up: str, down: str, size: int, inner: int, activation: Activation, bias: bool = False) -> PlainMLP:
        """Makes one of two matrices with these names: `[inner, size]` and `[size, inner]`."""
        return cls(Linear({up: inner}, size, bias), Linear({down: size}, inner, bias), activation)

    @property
    def readers(self) -> list[Linear]:
        return [self.up]

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.down(ops, self.up(ops, x, self.activation), residual=residual)


class XieluMLP(Layer):
    """`residual + down(xielu(up(x)))`. The four numbers of xIELU are tensors `{name}.alpha_p` and so on, scalars or
    vectors of one element."""

    operator = "mlp"

    def __init__(self, up: Linear, down: Linear, name: str):
        self.up = up
        self.down = down
        self.numbers = Vectors({f"{name}.{number}": 1 for number in ("alpha_p", "alpha_n", "beta", "eps")})

    @property
    def readers(self) -> list[Linear]:
        return [self.up]

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        super().choose(tensors)
        scalars = [name for name in self.numbers.lengths if tensors.get(name) == ()]
        self.numbers.sources = {name: TensorSource(()) for name in scalars}

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor | None = None) -> Tensor:
        activation = Xielu.from_raw(*self.numbers.values.tolist())
        return self.down(ops, self.up(ops, x, activation), residual=residual)
