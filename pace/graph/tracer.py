"""`Tracer`: stands in for `pace.ops.native` while a model's forward runs, and records what it is asked for.

The model's code sees symbols where it would see tensors. They can do what models do to tensors outside of `ops`: be cut
into heads, indexed by the rows whose logits are wanted, and added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pace.graph.instructions import (
    Add,
    Attention,
    Embedding,
    GatherRows,
    Heads,
    Instruction,
    Linear,
    Norm,
    NormHeads,
    NormParameters,
    RotateHeads,
    Rotation,
    StoreKv,
    Value,
)
from pace.ops.weight import PackedWeight


@dataclass(frozen=True)
class Ids:
    """The step's tokens, or its positions, plus a number."""

    positions: bool
    offset: int = 0

    def __add__(self, number: int) -> Ids:
        return Ids(self.positions, self.offset + number)


class LogitRows:
    """The rows whose logits are wanted."""


class Slots:
    """Where keys and values go."""


class Spans:
    """What belongs together."""


@dataclass(frozen=True)
class SymbolicBatch:
    """A `ForwardBatch` of no particular step. `kv` holds the number of each layer."""

    kv: range
    tokens: Ids = Ids(positions=False)
    positions: Ids = Ids(positions=True)
    slots: Slots = Slots()
    spans: Spans = Spans()
    logit_rows: LogitRows = LogitRows()


@dataclass(frozen=True)
class SymbolicAngles:
    """Cosines or sines `[T, half]` of the step."""

    half: int


@dataclass(frozen=True)
class Rows:
    """The symbol of a float32 matrix."""

    tracer: Tracer
    value: Value

    def __getitem__(self, rows: LogitRows) -> Rows:
        if not isinstance(rows, LogitRows):
            raise NotImplementedError(
                f"a recorded matrix can be indexed by the batch's logit_rows alone, not by {rows!r}"
            )
        out = Value(self.value.columns, per_token=False)
        return self.tracer.record(GatherRows(out, self.value))

    def __add__(self, other: Rows) -> Rows:
        out = Value(self.value.columns, self.value.per_token)
        return self.tracer.record(Add(out, self.value, other.value))

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> HeadRows:
        if dim != 1 or sizes[0] * sizes[1] != self.value.columns:
            raise NotImplementedError(
                f"{self.value.columns} columns can be cut into heads only, not along {dim} into {sizes}"
            )
        return HeadRows(Heads(self.value, 0, *sizes))


@dataclass(frozen=True)
class HeadRows:
    """The symbol of a view `[T, H, D]` of a matrix."""

    heads: Heads

    def __getitem__(self, index: tuple[slice, slice]) -> HeadRows:
        tokens, chosen = index
        start, stop, step = chosen.indices(self.heads.count)
        if tokens != slice(None) or step != 1:
            raise NotImplementedError(f"recorded heads can be sliced without gaps, for all tokens; not by {index}")
        column = self.heads.column + start * self.heads.head_dim
        return HeadRows(Heads(self.heads.value, column, stop - start, self.heads.head_dim))


class Tracer:
    """Has the functions of `pace.ops.native` that models call; each appends to `instructions`."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []

    def record(self, instruction: Instruction) -> Rows:
        self.instructions.append(instruction)
        return Rows(self, instruction.out)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"the operation {name!r} cannot be recorded yet; load the model with backend='native-eager'"
        )

    def embedding(self, ids: Ids, weight: PackedWeight) -> Rows:
        return self.record(Embedding(Value(weight.k), weight, ids.positions, ids.offset))

    def linear(
        self,
        x: Rows,
        weight: PackedWeight,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Rows | None = None,
    ) -> Rows:
        out = Value(weight.n, x.value.per_token)
        return self.record(Linear(out, x.value, weight, bias, activation, residual and residual.value))

    def linear_glu(self, x: Rows, weight: PackedWeight, activation: str, bias: Tensor | None = None) -> Rows:
        out = Value(weight.n_out, x.value.per_token)
        return self.record(Linear(out, x.value, weight, bias, activation, None))

    def rms_norm(self, x: Rows, weight: Tensor, eps: float) -> Rows:
        return self._norm(x, NormParameters("rms", weight, None, eps))

    def layer_norm(self, x: Rows, weight: Tensor | None, bias: Tensor | None, eps: float) -> Rows:
        return self._norm(x, NormParameters("layer", weight, bias, eps))

    def _norm(self, x: Rows, parameters: NormParameters) -> Rows:
        out = Value(x.value.columns, x.value.per_token)
        return self.record(Norm(out, x.value, parameters))

    def head_rms_norm_(self, x: HeadRows, weight: Tensor, eps: float) -> None:
        self.instructions.append(NormHeads(x.heads, NormParameters("rms", weight, None, eps)))

    def rotary_(self, x: HeadRows, cos: SymbolicAngles, sin: SymbolicAngles, interleaved: bool) -> None:
        self.instructions.append(RotateHeads(x.heads, Rotation(cos.half, interleaved)))

    def store_kv(self, k: HeadRows, v: HeadRows, layer: int, slots: Slots) -> None:
        self.instructions.append(StoreKv(k.heads, v.heads, layer))

    def attention(
        self,
        q: HeadRows,
        layer: int,
        spans: Spans,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Rows:
        out = Value(q.heads.count * q.heads.head_dim)
        return self.record(Attention(out, q.heads, layer, scale, window, softcap))
