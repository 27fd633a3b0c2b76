"""Rows on symbols: of tables, given by the step, pooled, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from pace import _C
from pace.graph.instructions import Columns, Instruction, Places, Value
from pace.graph.symbols import GivenColumns, GivenPlaces, Ids, Rows, SpanStarts
from pace.ops.checks import check_pooling
from pace.ops.file_table import RowTable
from pace.ops.weight import PackedWeight

if TYPE_CHECKING:
    from pace.batch import ForwardBatch


@dataclass(eq=False)
class Embedding(Instruction):
    """out = rows `ids + offset` of the weight; `ids` are the step's "tokens", "positions" or "types"."""

    operations = ("embedding",)
    operator = "embedding"
    out: Value
    weight: PackedWeight
    ids: str
    offset: int

    def lower(self, program: _C.Program, places: Places) -> None:
        program.embedding(places.value(self.out), self.weight, self.ids, self.offset)


@dataclass(eq=False)
class ReadRows(Instruction):
    """out = rows `ids + offset` of a table. They are read before the step, and are input `number` of the program."""

    out: Value
    table: RowTable
    ids: str
    offset: int
    number: int

    def read(self, batch: ForwardBatch) -> Tensor:
        """Returns the rows of a step, float32 `[T, k]`."""
        ids = getattr(batch, self.ids)
        return self.table.of_step(batch).rows(ids + self.offset if self.offset else ids).float()

    def lower(self, program: _C.Program, places: Places) -> None:
        program.input_rows(places.value(self.out), self.number)

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield "embedding"


def embedding(ids: Ids, weight: PackedWeight | RowTable) -> Rows:
    recording = ids.recording
    if not isinstance(weight, RowTable):
        return recording.rows(Embedding(Value(weight.k), weight, ids.kind, ids.offset))
    number = sum(isinstance(instruction, ReadRows) for instruction in recording.instructions)
    return recording.rows(ReadRows(Value(weight.k), weight, ids.kind, ids.offset, number))


@dataclass(eq=False)
class Given(Instruction):
    """out = columns `first ..` of the step's given rows, one for each token."""

    operations = ("given_rows",)
    operator = "embedding"
    out: Value
    first: int

    def lower(self, program: _C.Program, places: Places) -> None:
        program.given_rows(places.value(self.out), self.first)


def given_rows(rows: GivenColumns) -> Rows:
    return rows.recording.rows(Given(Value(rows.count), rows.first))


@dataclass(eq=False)
class PlaceRows(Instruction):
    """Some rows of x become columns `first ..` of the step's given rows, or with `add` the sum of both."""

    operations = ("place_rows_",)
    operator = "embedding"
    changed = "x"
    x: Columns
    first: int
    add: bool

    def lower(self, program: _C.Program, places: Places) -> None:
        program.place_rows(places.columns(self.x), self.first, self.add)


def place_rows_(x: Rows, rows: GivenColumns, at: GivenPlaces, add: bool) -> None:
    if rows.count != x.columns.count:
        raise ValueError(f"rows must be float32 [G, {x.columns.count}], as wide as x; got {rows.count} columns")
    x.recording.append(PlaceRows(x.columns, rows.first, add))


@dataclass(eq=False)
class Pool(Instruction):
    """out = one row for each span of the step. The step must have one logit row for each span."""

    operations = ("pool",)
    operator = "norm"
    out: Value
    x: Columns
    pooling: str

    def lower(self, program: _C.Program, places: Places) -> None:
        program.pool(places.value(self.out), places.columns(self.x), self.pooling)


def pool(x: Rows, starts: SpanStarts, pooling: str) -> Rows:
    check_pooling(pooling)
    return x.recording.rows(Pool(Value(x.columns.count, per_token=False), x.columns, pooling))


@dataclass(eq=False)
class Concatenate(Instruction):
    """out = [a | b]."""

    operations = ("concatenate",)
    operator = "projection"
    out: Value
    a: Columns
    b: Columns

    def lower(self, program: _C.Program, places: Places) -> None:
        program.concatenate(places.value(self.out), places.columns(self.a), places.columns(self.b))


def concatenate(a: Rows, b: Rows) -> Rows:
    return a.recording.rows(Concatenate(a.like(a.columns.count + b.columns.count), a.columns, b.columns))
