"""Norms of rows on symbols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pace import _C
from pace.graph.instructions import Columns, Instruction, Places, Value
from pace.graph.symbols import Rows
from pace.ops.checks import check_vector
from pace.ops.kernels.norm import GatedNormParameters, NormParameters, gated_norm_parameters


@dataclass(eq=False)
class Norm(Instruction):
    """out = norm(x), or with a residual, factor * (residual + norm(x))."""

    operations = ("rms_norm", "layer_norm")
    operator = "norm"
    out: Value
    x: Columns
    parameters: NormParameters
    residual: Columns | None = None
    factor: float = 1.0

    def lower(self, program: _C.Program, places: Places) -> None:
        residual = self.residual and places.columns(self.residual)
        program.norm(places.value(self.out), places.columns(self.x), self.parameters, residual, self.factor)

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield "norm"
        if self.factor != 1.0:
            yield "norm"


def rms_norm(x: Rows, weight: Tensor, eps: float) -> Rows:
    check_vector("weight", weight, x.columns.count)
    return x.recording.rows(Norm(x.like(), x.columns, NormParameters("rms", weight, None, eps)))


def layer_norm(x: Rows, weight: Tensor | None, bias: Tensor | None, eps: float) -> Rows:
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_vector(name, vector, x.columns.count)
    return x.recording.rows(Norm(x.like(), x.columns, NormParameters("layer", weight, bias, eps)))


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
