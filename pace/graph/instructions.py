"""What a recorded forward pass is made of: values, and instructions that read and write them.

A `Value` is written by one instruction, except that instructions on heads change theirs in place. Fields named in
`outputs` are written; every other field that holds values is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from pace.ops.weight import PackedWeight


@dataclass(eq=False)
class Value:
    """float32 `[T, columns]`, or `[R, columns]` where `per_token` is false."""

    columns: int
    per_token: bool = True


@dataclass(frozen=True)
class Heads:
    """A view `[T, count, head_dim]` into the columns of a value, from `column` on."""

    value: Value
    column: int
    count: int
    head_dim: int


@dataclass(frozen=True)
class NormParameters:
    kind: str
    """"rms" or "layer"."""
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class Rotation:
    """By the step's angles: `half` pairs of each head."""

    half: int
    interleaved: bool


@dataclass(eq=False)
class Instruction:
    outputs: ClassVar[tuple[str, ...]] = ("out",)

    def reads(self) -> Iterator[Value]:
        for field in fields(self):
            if field.name not in self.outputs:
                yield from _values(getattr(self, field.name))

    def writes(self) -> Iterator[Value]:
        for name in self.outputs:
            yield from _values(getattr(self, name))


def _values(operand: Any) -> Iterator[Value]:
    if isinstance(operand, Value):
        yield operand
    elif isinstance(operand, Heads):
        yield operand.value
    elif isinstance(operand, Preparation):
        yield operand.k.value
        yield operand.v.value


@dataclass(eq=False)
class Embedding(Instruction):
    """out = rows `ids + offset` of the weight; `ids` are the step's tokens or its positions."""

    out: Value
    weight: PackedWeight
    positions: bool
    offset: int


@dataclass(eq=False)
class GatherRows(Instruction):
    """out `[R]` = the rows of x `[T]` whose logits are wanted."""

    out: Value
    x: Value


@dataclass(eq=False)
class Add(Instruction):
    out: Value
    a: Value
    b: Value


@dataclass(eq=False)
class Norm(Instruction):
    out: Value
    x: Value
    parameters: NormParameters


@dataclass(eq=False)
class Linear(Instruction):
    """out = residual + activation(norm(x) W' + bias); with a glu weight act(gate) * up."""

    out: Value
    x: Value
    weight: PackedWeight
    bias: Tensor | None
    activation: str | None
    residual: Value | None
    norm: NormParameters | None = None


@dataclass(eq=False)
class NormHeads(Instruction):
    outputs = ("heads",)
    heads: Heads
    parameters: NormParameters

    def reads(self) -> Iterator[Value]:
        yield self.heads.value


@dataclass(eq=False)
class RotateHeads(Instruction):
    outputs = ("heads",)
    heads: Heads
    rotation: Rotation

    def reads(self) -> Iterator[Value]:
        yield self.heads.value


@dataclass(eq=False)
class StoreKv(Instruction):
    """Keys and values of the step's tokens into the cache of a layer."""

    outputs = ()
    k: Heads
    v: Heads
    layer: int


@dataclass(frozen=True)
class Preparation:
    """What attention does before: normalises and rotates queries and keys, each where asked, and stores keys and
    values."""

    k: Heads
    v: Heads
    query_norm: NormParameters | None = None
    key_norm: NormParameters | None = None
    rotation: Rotation | None = None


@dataclass(eq=False)
class Attention(Instruction):
    out: Value
    q: Heads
    layer: int
    scale: float
    window: int | None
    softcap: float | None
    preparation: Preparation | None = None
