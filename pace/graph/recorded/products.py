"""Products with weights on symbols, and the adapters added to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pace import _C
from pace.graph.instructions import Columns, Heads, Instruction, Places, Value
from pace.graph.symbols import HeadRows, Routing, Rows
from pace.ops.adapters import AdapterTable
from pace.ops.experts import Activation as ActivationFunction
from pace.ops.kernels import adapters as adapter_kernels
from pace.ops.kernels import experts as expert_kernels
from pace.ops.kernels.norm import NormParameters
from pace.ops.weight import PackedWeight


@dataclass(eq=False)
class Linear(Instruction):
    """out = residual + activation(norm(x) W' + bias); with a glu weight, act(gate) * up, or both `apart`. The residual
    must be a whole value.

    `adapters` of norm(x) are added to `residual + norm(x) W' + bias`, or to gate and up. With adapters, only a glu
    weight has an activation."""

    operations = ("linear", "linear_glu")
    out: Value
    x: Columns
    weight: PackedWeight
    bias: Tensor | None
    activation: ActivationFunction | None
    residual: Columns | None
    norm: NormParameters | None = None
    apart: bool = False
    adapters: AdapterTable | None = None

    def lower(self, program: _C.Program, places: Places) -> None:
        program.linear(
            places.value(self.out),
            places.columns(self.x),
            self.norm,
            self.weight,
            self.bias,
            self.activation,
            self.residual and places.value(self.residual.value),
            self.apart,
            self.adapters,
        )

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield of_weight[id(self.weight)]
        if self.adapters:
            yield "projection"
        if self.norm:
            yield "norm"


def linear(
    x: Rows,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: ActivationFunction | None = None,
    residual: Rows | None = None,
) -> Rows:
    added = residual and residual.columns
    if added and added.count != weight.n:
        raise ValueError(f"residual must be float32 [T, {weight.n}]; got {added.count} columns")
    if added and not added.is_whole:
        raise NotImplementedError("the residual of a recorded product is a whole matrix; add columns of one by +")
    return _product(x, weight, bias, activation, added, weight.glu)


def linear_glu(x: Rows, weight: PackedWeight, activation: str, bias: Tensor | None = None) -> Rows:
    return _product(x, weight, bias, activation, None, False)


def _product(
    x: Rows,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: ActivationFunction | None,
    residual: Columns | None,
    apart: bool,
) -> Rows:
    if x.columns.count != weight.k:
        raise ValueError(f"x must be float32 [T, {weight.k}]; got {x.columns.count} columns")
    out = x.like(weight.n if apart else weight.n_out)
    return x.recording.rows(Linear(out, x.columns, weight, bias, activation, residual, apart=apart))


@dataclass(eq=False)
class AddAdapters(Instruction):
    """y += the adapters that each row is routed to, of norm(x); in place."""

    operations = ("add_adapters_",)
    operator = "projection"
    changed = "y"
    y: Columns
    x: Columns
    adapters: AdapterTable
    norm: NormParameters | None = None

    def lower(self, program: _C.Program, places: Places) -> None:
        program.add_adapters(places.columns(self.y), places.columns(self.x), self.norm, self.adapters)

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield "projection"
        if self.norm:
            yield "norm"


def add_adapters_(y: Rows, x: Rows, adapters: AdapterTable, routing: Routing) -> None:
    adapter_kernels.check_adapters(adapters, y.columns.count, x.columns.count)
    y.recording.append(AddAdapters(y.columns, x.columns, adapters))


@dataclass(eq=False)
class HeadsLinear(Instruction):
    """out = each head of x times its own weight."""

    operations = ("heads_linear",)
    operator = "projection"
    out: Value
    x: Heads
    weights: expert_kernels.ExpertStack

    def lower(self, program: _C.Program, places: Places) -> None:
        program.heads_linear(places.value(self.out), places.heads(self.x), self.weights)


def heads_linear(x: HeadRows, weights: expert_kernels.ExpertStack) -> Rows:
    heads = x.heads
    expert_kernels.check_head_stack(weights, heads.count, heads.head_dim)
    return x.recording.rows(HeadsLinear(Value(heads.count * weights.n), heads, weights))
