"""Symbols that stand for tensors while a model's forward pass is recorded.

They support a model's operations on tensors outside of `ops`: slicing columns, splitting into heads, selecting the rows
of logits, copying, and adding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pace import _C
from pace.batch import Latent, LayerCache, Shares
from pace.graph.instructions import Columns, Heads, Instruction, Places, Value
from pace.states import State


@dataclass(frozen=True, eq=False)
class Recording:
    """The instructions so far; every symbol refers to its recording."""

    instructions: list[Instruction] = field(default_factory=list)

    def append(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)

    def rows(self, instruction: Instruction) -> Rows:
        """Appends an instruction and returns the symbol of its output."""
        self.append(instruction)
        return Rows(self, instruction.out.whole)

    def batch(self, layers: Sequence[LayerCache]) -> SymbolicBatch:
        """A symbolic `ForwardBatch`, for a model whose `KVSpec` has these layers."""
        ids = [Ids(self, kind) for kind in ("tokens", "positions", "types")]
        return SymbolicBatch(symbolic_cache(layers), *ids, SymbolicGiven(GivenMatrix(self)), KeptMatrix(self))


@dataclass(frozen=True)
class Ids:
    """The step's tokens, positions or types, plus an offset."""

    recording: Recording
    kind: str
    offset: int = 0

    def __add__(self, number: int) -> Ids:
        return Ids(self.recording, self.kind, self.offset + number)


@dataclass(frozen=True)
class GivenColumns:
    """Columns `first .. first + count` of the step's given rows."""

    recording: Recording
    first: int
    count: int


@dataclass(frozen=True)
class GivenMatrix:
    """The step's given rows, of any width."""

    recording: Recording

    def __getitem__(self, index: tuple[slice, slice]) -> GivenColumns:
        """`rows[:, first:last]`."""
        chosen = _slice_of_all_tokens(index, 2)
        if chosen is None or chosen[0].stop is None or not 0 <= (chosen[0].start or 0) < chosen[0].stop:
            raise NotImplementedError(f"recorded given rows are indexed by neighbouring columns; got {index!r}")
        first = chosen[0].start or 0
        return GivenColumns(self.recording, first, chosen[0].stop - first)


@dataclass(frozen=True)
class KeptMatrix:
    """The rows that the step writes next to its logits."""

    recording: Recording

    def __setitem__(self, index: tuple[slice, slice], x: Rows) -> None:
        """`kept[:, first:last] = x`, where x has a row for each token."""
        chosen = _slice_of_all_tokens(index, 2)
        first = chosen[0].start or 0 if chosen else 0
        if chosen is None or chosen[0].stop != first + x.columns.count or not x.columns.value.per_token:
            raise NotImplementedError(f"recorded rows are kept in as many neighbouring columns; got {index!r}")
        self.recording.append(KeepRows(x.columns, first))


class GivenPlaces:
    """The rows that given rows stand for."""


@dataclass(frozen=True)
class SymbolicGiven:
    """Symbols with the field names of `GivenRows`."""

    rows: GivenMatrix
    at: GivenPlaces = GivenPlaces()


class Routing:
    """The adapters of each row of the step. A matrix of logit rows takes those of its rows."""


class LogitRows:
    """The rows whose logits are returned."""


@dataclass(frozen=True)
class LayerKv:
    """The cache of one layer."""

    number: int
    """Index among the layers that have a cache."""
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class LayerState:
    """The slots of one layer."""

    number: int
    """Index among the layers that have a cache."""
    state: State


def symbolic_cache(layers: Sequence[LayerCache]) -> list[LayerKv | LayerState | None]:
    """The symbolic cache of each layer."""
    cache: list[LayerKv | LayerState | None] = []
    for layer in layers:
        if isinstance(layer, Shares):
            layer = layers[layer.layer]
        if isinstance(layer, Latent):
            layer = layer.positions
        number = sum(kv is not None for kv in cache)
        if isinstance(layer, State):
            cache.append(LayerState(number, layer))
        else:
            cache.append(layer and LayerKv(number, layer.key_dim, layer.value_dim))
    return cache


class Slots:
    """The slots of the step's keys and values."""


class SpanStarts:
    """The first row of each span, and the number of rows."""


@dataclass(frozen=True)
class Spans:
    """The spans of the step."""

    query_start: SpanStarts = SpanStarts()


class StateSpans:
    """The slots that the step reads and writes."""


@dataclass(frozen=True)
class SymbolicBatch:
    """Symbols with the field names of `ForwardBatch`."""

    kv: list[LayerKv | LayerState | None]
    tokens: Ids
    positions: Ids
    types: Ids
    given: SymbolicGiven
    kept: KeptMatrix
    slots: Slots = Slots()
    spans: Spans = Spans()
    logit_rows: LogitRows = LogitRows()
    states: StateSpans = StateSpans()
    routing: Routing = Routing()

    def of_layer(self, kv: LayerKv | LayerState | None) -> SymbolicBatch:
        """Returns itself: when the program runs, a layer's cache selects its slots and block table."""
        return self


@dataclass(frozen=True)
class SymbolicAngles:
    """Cosines or sines `[T, half]` of one table of the step's angles."""

    half: int
    table: int = 0


@dataclass(frozen=True)
class Rows:
    """The symbol of a float32 matrix, which may be a view of another's columns."""

    recording: Recording
    columns: Columns

    def __getitem__(self, index: LogitRows | tuple[slice, slice]) -> Rows:
        """`x[batch.logit_rows]`, a new matrix, or `x[:, first:last]`, a view."""
        if isinstance(index, LogitRows):
            return self.recording.rows(GatherRows(Value(self.columns.count, per_token=False), self.columns))
        chosen = _slice_of_all_tokens(index, 2)
        if chosen is None:
            raise NotImplementedError(
                "a recorded matrix can be indexed by the batch's logit_rows, or by neighbouring columns of all rows; "
                f"got {index!r}"
            )
        start, stop, _ = chosen[0].indices(self.columns.count)
        view = Columns(self.columns.value, self.columns.first + start, max(0, stop - start))
        return Rows(self.recording, view)

    def __add__(self, other: Rows) -> Rows:
        if other.columns.count != self.columns.count:
            raise ValueError(f"matrices of {self.columns.count} columns and {other.columns.count} cannot be added")
        return self.recording.rows(Add(self.like(), self.columns, other.columns))

    def clone(self) -> Rows:
        """Returns a copy, a new matrix."""
        return self.recording.rows(Copy(self.like(), self.columns))

    def like(self, columns: int | None = None) -> Value:
        """A new value with the rows of this matrix."""
        return Value(columns or self.columns.count, self.columns.value.per_token)

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> HeadRows:
        """Returns a view `[T, H, D]`."""
        columns = self.columns
        if sizes[1] == -1:
            sizes = sizes[0], columns.count // sizes[0]
        if dim != 1 or sizes[0] * sizes[1] != columns.count or not columns.value.per_token:
            raise NotImplementedError(
                f"{columns.count} columns of all tokens can be split into heads, along dimension 1; got dimension "
                f"{dim} and sizes {sizes}"
            )
        count, head_dim = sizes
        return HeadRows(self.recording, Heads(columns.value, columns.first, count, head_dim, head_dim))


@dataclass(frozen=True)
class HeadRows:
    """The symbol of a view `[T, H, D]` of a matrix."""

    recording: Recording
    heads: Heads

    def __getitem__(self, index: tuple[slice, ...]) -> HeadRows:
        """`x[:, first:last]`, some of the heads, or `x[:, :, first:last]`, a part of each."""
        chosen = _slice_of_all_tokens(index, 3)
        if chosen is None:
            raise NotImplementedError(f"recorded heads can be sliced without gaps, for all tokens; not by {index}")
        heads, elements = (chosen + [slice(None)])[:2]
        first_head, last_head, _ = heads.indices(self.heads.count)
        first, last, _ = elements.indices(self.heads.head_dim)
        part = replace(
            self.heads,
            column=self.heads.column + first_head * self.heads.stride + first,
            count=max(0, last_head - first_head),
            head_dim=max(0, last - first),
        )
        return HeadRows(self.recording, part)

    def clone(self) -> HeadRows:
        """Returns a copy of adjacent heads, a new matrix."""
        return self.flatten(1).clone().unflatten(1, (self.heads.count, self.heads.head_dim))

    def flatten(self, start_dim: int) -> Rows:
        """Returns a view `[T, H * D]` of adjacent heads."""
        heads = self.heads
        if start_dim != 1 or heads.stride != heads.head_dim:
            raise NotImplementedError(f"only adjacent recorded heads can be flattened; got {heads}")
        return Rows(self.recording, Columns(heads.value, heads.column, heads.count * heads.head_dim))


def _slice_of_all_tokens(index: object, max_dims: int) -> list[slice] | None:
    """Returns the slices of the dimensions after the first; None unless each is a slice with step 1."""
    if not isinstance(index, tuple) or not 2 <= len(index) <= max_dims or index[0] != slice(None):
        return None
    chosen = list(index[1:])
    return chosen if all(isinstance(part, slice) and part.step in (None, 1) for part in chosen) else None


@dataclass(eq=False)
class GatherRows(Instruction):
    """out `[R]` = the rows of x `[T]` whose logits are returned."""

    out: Value
    x: Columns

    def lower(self, program: _C.Program, places: Places) -> None:
        program.gather_rows(places.value(self.out), places.columns(self.x))


@dataclass(eq=False)
class KeepRows(Instruction):
    """Columns `first ..` of the step's kept rows = x."""

    x: Columns
    first: int

    def lower(self, program: _C.Program, places: Places) -> None:
        program.keep_rows(places.columns(self.x), self.first)


@dataclass(eq=False)
class Add(Instruction):
    """out = a + b."""

    out: Value
    a: Columns
    b: Columns

    def lower(self, program: _C.Program, places: Places) -> None:
        program.add(places.value(self.out), places.columns(self.a), places.columns(self.b))


@dataclass(eq=False)
class Copy(Instruction):
    """out = x."""

    out: Value
    x: Columns

    def lower(self, program: _C.Program, places: Places) -> None:
        program.activation(places.value(self.out), places.columns(self.x), None)
