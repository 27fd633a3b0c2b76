"""Functions of every element on symbols."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pace import _C
from pace.graph.instructions import Columns, Instruction, Places, Value
from pace.graph.symbols import Rows
from pace.ops.experts import Activation as ActivationFunction
from pace.ops.kernels.elementwise import check_factor, check_gate


@dataclass(eq=False)
class Activation(Instruction):
    """out = a function of every element of x."""

    operations = ("activation",)
    operator = "mlp"
    out: Value
    x: Columns
    function: ActivationFunction

    def lower(self, program: _C.Program, places: Places) -> None:
        program.activation(places.value(self.out), places.columns(self.x), self.function)


def activation(x: Rows, activation: ActivationFunction) -> Rows:
    return x.recording.rows(Activation(x.like(), x.columns, activation))


@dataclass(eq=False)
class Glu(Instruction):
    """out = act(gate) * up, for x = [gate | up]."""

    operations = ("glu",)
    operator = "mlp"
    out: Value
    x: Columns
    function: str

    def lower(self, program: _C.Program, places: Places) -> None:
        program.glu(places.value(self.out), places.columns(self.x), self.function)


def glu(x: Rows, activation: str) -> Rows:
    if x.columns.count % 2:
        raise ValueError(f"x must be float32 [T, 2 K], gate and up; got {x.columns.count} columns")
    return x.recording.rows(Glu(x.like(x.columns.count // 2), x.columns, activation))


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
class Scale(Instruction):
    """x *= factor, in place; a number, or one for each column."""

    operations = ("scale_",)
    operator = "norm"
    changed = "x"
    x: Columns
    factor: float | Tensor

    def lower(self, program: _C.Program, places: Places) -> None:
        factors = (1.0, self.factor) if isinstance(self.factor, Tensor) else (self.factor,)
        program.scale(places.columns(self.x), *factors)


def scale_(x: Rows, factor: float | Tensor) -> None:
    check_factor(factor, x.columns.count)
    x.recording.append(Scale(x.columns, factor))


@dataclass(eq=False)
class Softcap(Instruction):
    """x = cap * tanh(x / cap), in place."""

    operations = ("softcap_",)
    operator = "lm_head"
    changed = "x"
    x: Columns
    cap: float

    def lower(self, program: _C.Program, places: Places) -> None:
        program.softcap(places.columns(self.x), self.cap)


def softcap_(x: Rows, cap: float) -> None:
    x.recording.append(Softcap(x.columns, cap))
