"""Layers that keep a state, on symbols."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pace import _C
from pace.graph.instructions import Columns, Heads, Instruction, Places, Value
from pace.graph.symbols import HeadRows, LayerState, Rows, StateSpans
from pace.ops.kernels.states import check_recurrence, convolution_weight
from pace.ops.protocol import RecurrenceOptions


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
