"""Values and instructions of a recorded forward pass.

One instruction writes a `Value`; instructions with `changed` modify an existing one in place. The instructions are in
`pace.graph.recorded`, next to the operations that record them. `pace.graph.symbols` has the operations of models on
tensors outside of `pace.ops`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from pace import _C

LOGITS = -1
"""The buffer number of the result."""


@dataclass(eq=False)
class Value:
    """A float32 matrix `[T, columns]`, or `[R, columns]` if `per_token` is false."""

    columns: int
    per_token: bool = True

    @property
    def whole(self) -> Columns:
        return Columns(self, 0, self.columns)


@dataclass(frozen=True)
class Columns:
    """Columns `first .. first + count` of a value: a matrix with strided rows."""

    value: Value
    first: int
    count: int

    @property
    def is_whole(self) -> bool:
        return self.count == self.value.columns

    def ranges(self) -> Iterator[range]:
        """The columns of the value that this covers."""
        yield range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Heads:
    """A view `[T, count, head_dim]` of a value's columns: heads start at `column`, one every `stride` columns."""

    value: Value
    column: int
    count: int
    head_dim: int
    stride: int

    def ranges(self) -> Iterator[range]:
        """The columns of the value that this covers."""
        if self.stride == self.head_dim:
            yield range(self.column, self.column + self.count * self.head_dim)
            return
        for head in range(self.count):
            first = self.column + head * self.stride
            yield range(first, first + self.head_dim)


def overlap(a: Columns | Heads, b: Columns | Heads) -> bool:
    """True if the two share a column of the same value."""
    return a.value is b.value and any(
        mine.start < other.stop and other.start < mine.stop for mine in a.ranges() for other in b.ranges()
    )


class Places:
    """Locations of a program's values in C++ terms, for `Instruction.lower`."""

    def __init__(self, buffers: Mapping[Value, int], result: Value):
        """`buffers`: value -> number of its buffer (`plan_buffers`); `result` is written to the caller's logits."""
        self._buffers = buffers
        self._result = result

    def value(self, value: Value) -> _C.Value:
        buffer = LOGITS if value is self._result else self._buffers[value]
        return _C.Value(buffer, value.columns, value.per_token)

    def columns(self, columns: Columns) -> _C.Columns:
        return _C.Columns(self.value(columns.value), columns.first, columns.count)

    def heads(self, heads: Heads) -> _C.Heads:
        return _C.Heads(self.value(heads.value), heads.column, heads.count, heads.head_dim, heads.stride)


@dataclass(eq=False)
class Instruction(ABC):
    """One op of csrc/ops with its operands. `out` is the `Value` that it makes; fields of type `Columns` or `Heads` are
    read."""

    changed: ClassVar[str | None] = None
    """The field that an in-place operation reads and writes."""
    operations: ClassVar[tuple[str, ...]] = ()
    """The functions of `pace.ops` that record it; empty for a model's own operations on tensors."""
    operator: ClassVar[str | None] = None
    """The operator in `OperatorConfig` of these functions. None for the operator of their weight, or, without
    `operations`, for no operator."""

    @abstractmethod
    def lower(self, program: _C.Program, places: Places) -> None:
        """Appends this instruction to the program."""

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        """Yields the operator of each operation that this instruction does, the main one first. `of_weight`: id of a
        weight -> the operator of its products."""
        if self.operator:
            yield self.operator

    def reads(self) -> Iterator[Columns | Heads]:
        for field in fields(self):
            operand = getattr(self, field.name)
            if isinstance(operand, (Columns, Heads)):
                yield operand

    def changes(self) -> Columns | Heads | None:
        """The part of an existing value that it modifies."""
        return getattr(self, self.changed) if self.changed else None

    def makes(self) -> Value | None:
        """The new value that it makes."""
        return getattr(self, "out", None)

    def values(self) -> list[Value]:
        """All values that it reads or writes, each once."""
        made = self.makes()
        return list(dict.fromkeys([*(operand.value for operand in self.reads()), *([made] if made else [])]))
