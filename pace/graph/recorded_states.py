"""Operations on states, and gates, on symbols: the part of `pace.graph.recorded` for layers that keep a state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pace import _C
from pace.graph.instructions import Columns, Heads, Instruction, Places, Value
from pace.graph.symbols import HeadRows, LayerState, Rows, StateSpans
from pace.ops.kernels.elementwise import check_gate
from pace.ops.kernels.norm import GatedNormParameters, gated_norm_parameters
from pace.ops.kernels.states import check_recurrence, convolution_weight
from pace.ops.protocol import RecurrenceOptions


@dataclass(eq=False)
class Gate(Instruction):
    """x *= activation(gate), in place; each column of the gate is for the same number of columns of x."""

    operations = ("gate_",)
    operator = "mlp"
    changed = "x"
    x: Columns
    gate: Columns
    activation: str | None

    def lower(self, program: _C.Program, places: Places) -> None:
        program.gate(places.columns(self.x), places.columns(self.gate), self.activation)


def gate_(x: Rows, gate: Rows, activation: str | None = "sigmoid") -> None:
    check_gate(x.columns.count, gate.columns.count)
    x.recording.append(Gate(x.columns, gate.columns, activation))


@dataclass(eq=False)
class GatedNorm(Instruction):
    """out = norm(x) * activation(gate), or the norm of the product."""

    operations = ("gated_norm",)
    operator = "norm"
    out: Value
    x: Columns
    gate: Columns
    parameters: GatedNormParameters

    def lower(self, program: _C.Program, places: Places) -> None:
        program.gated_norm(places.value(self.out), places.columns(self.x), places.columns(self.gate), self.parameters)


def gated_norm(x: Rows, gate: Rows, weight: Tensor, eps: float, groups: int, activation: str, norm_first: bool) -> Rows:
    columns = x.columns.count
    if gate.columns.count != columns:
        raise ValueError(f"gate must be float32 [T, {columns}], as x; got {gate.columns.count} columns")
    parameters = gated_norm_parameters(columns, weight, eps, groups, activation, norm_first)
    return x.recording.rows(GatedNorm(x.like(), x.columns, gate.columns, parameters))


@dataclass(eq=False)
class CausalConv(Instruction):
    """out = the convolution of x and the inputs that the layer's slots hold, which it writes."""

    operations = ("causal_conv",)
    operator = "attention"
    out: Value
    x: Columns
    layer: int
    weight: Tensor
    """`[L, C]`."""
    bias: Tensor | None
    activation: str | None

    def lower(self, program: _C.Program, places: Places) -> None:
        program.causal_conv(
            places.value(self.out),
            places.columns(self.x),
            self.layer,
            self.weight,
            self.bias,
            self.activation == "silu",
        )


def causal_conv(
    x: Rows, weight: Tensor, bias: Tensor | None, activation: str | None, slots: LayerState, spans: StateSpans
) -> Rows:
    weight = convolution_weight(slots.state, x.columns.count, weight, bias, activation)
    return x.recording.rows(CausalConv(x.like(), x.columns, slots.number, weight, bias, activation))


@dataclass(eq=False)
class Recurrence(Instruction):
    """out = the recurrence of each head over the matrices that the layer's slots hold, which it writes."""

    operations = ("recurrence",)
    operator = "attention"
    out: Value
    q: Heads
    k: Heads
    v: Heads
    steps: Columns
    beta: Columns | None
    layer: int
    options: RecurrenceOptions

    def lower(self, program: _C.Program, places: Places) -> None:
        program.recurrence(
            places.value(self.out),
            places.heads(self.q),
            places.heads(self.k),
            places.heads(self.v),
            places.columns(self.steps),
            self.beta and places.columns(self.beta),
            self.layer,
            self.options,
        )


def recurrence(
    q: HeadRows,
    k: HeadRows,
    v: HeadRows,
    steps: Rows,
    beta: Rows | None,
    slots: LayerState,
    spans: StateSpans,
    options: RecurrenceOptions,
) -> Rows:
    state, values, keys = slots.state, v.heads, q.heads
    if (k.heads.count, k.heads.head_dim) != (keys.count, keys.head_dim):
        raise ValueError(f"q and k must have the same heads; got {keys} and {k.heads}")
    check_recurrence(state, options, (values.count, values.head_dim), (keys.count, keys.head_dim), beta is not None)
    for name, columns, rows in (("steps", state.heads * state.decay_dim, steps), ("beta", state.heads, beta)):
        if rows is not None and rows.columns.count != columns:
            raise ValueError(f"{name} must be float32 [T, {columns}]; got {rows.columns.count} columns")
    out = Value(values.count * values.head_dim)
    of_beta = beta and beta.columns
    return v.recording.rows(Recurrence(out, keys, k.heads, values, steps.columns, of_beta, slots.number, options))
