"""States: what layers of linear attention, Mamba-2 and short convolutions keep of a sequence in place of positions.

A state has a fixed size. All states of one sequence, at one position, are one *slot*. A step reads a slot and writes
one. If these are two, the old one stays as it was: forks and prefixes share slots without a copy. Tokens that may be
dropped later (drafts) do not change the state in a slot. They leave rows in its *journal*, and the next step applies
those that were accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pace.memory import reserve

SLOT_ALIGNMENT = 64
"""Bytes: the parts of a slot begin at a cache line."""


@dataclass(frozen=True)
class State:
    """A layer that keeps a state: the last inputs of a causal convolution, a matrix for each head, or both."""

    channels: int = 0
    """Channels of the convolution; 0 for none."""
    kernel: int = 1
    """Width of the convolution. The state has the last `kernel - 1` inputs."""
    heads: int = 0
    """Heads of the recurrence; 0 for none."""
    key_dim: int = 0
    """Rows of a head's matrix."""
    value_dim: int = 0
    """Columns of a head's matrix."""
    decay_dim: int = 1
    """Decays of a head: 1, or `key_dim` for one decay per row."""

    def __post_init__(self) -> None:
        if not self.channels and not self.heads:
            raise ValueError(f"a state needs a convolution or heads; got {self}")
        if self.heads and self.decay_dim not in (1, self.key_dim):
            raise ValueError(f"a head has 1 decay or one for each of its {self.key_dim} rows; got {self.decay_dim}")

    @property
    def journal_dim(self) -> int:
        """Elements of a head in a row of the journal: `[decay | key | delta]`."""
        return self.decay_dim + self.key_dim + self.value_dim


@dataclass(frozen=True)
class StateSlots:
    """The slots of one layer. All parts are strided views of one memory, in float32 (float64 in a float64 model)."""

    state: State
    inputs: Tensor | None
    """`[slots, kernel - 1, channels]`: the last inputs of the convolution, oldest first. None without a convolution, or
    for a kernel of 1."""
    matrix: Tensor | None
    """`[slots, heads, key_dim, value_dim]`; None without a recurrence."""
    journal_inputs: Tensor | None
    """`[slots, journal rows, channels]`: inputs of the convolution for each draft; None without drafts."""
    journal: Tensor | None
    """`[slots, journal rows, heads, decay_dim + key_dim + value_dim]`: the update of the matrix for each draft. A row
    has what the update used: the decay, the normalised key of the value head, and d of `recurrence`."""


@dataclass(frozen=True)
class StateSpans:
    """What a step reads and writes of the slots: one entry per span. All int32.

    For each span, a layer with a state does this, in order:

    1. It reads slot `read`. -1 reads zeros.
    2. It applies the first `replay` rows of the journal of slot `read`.
    3. It computes the tokens of the span, one after the other. After `certain` tokens it writes its state to slot
       `write`. After `mark_rows[m]` tokens it writes it to slot `mark_slots[m]`, for the marks of the span.
    4. A token from `certain` on is a draft. It leaves a row in the journal of slot `write`, the first draft in row 0.

    `read` and `write` of a span may be equal: its journal is applied before it is written. A slot that a step writes,
    also for a mark, is written once and read by no other span. Several spans may read the same slot."""

    query_start: Tensor
    """`[S + 1]`: the same tensor as in `Spans`."""
    read: Tensor
    """`[S]`, -1 or a slot."""
    replay: Tensor
    """`[S]`, 0 to the rows of the journal; 0 where `read` is -1."""
    write: Tensor
    """`[S]`."""
    certain: Tensor
    """`[S]`, 1 to the tokens of the span."""
    mark_start: Tensor
    """`[S + 1]`, from 0 to M: the marks of span s are `mark_start[s] .. mark_start[s + 1]`."""
    mark_rows: Tensor
    """`[M]`, 1 to `certain` of the span: tokens of the span before the mark; ascending within a span."""
    mark_slots: Tensor
    """`[M]`."""


class _Part(NamedTuple):
    """A part of one layer's state in a slot."""

    layer: int
    name: str
    shape: tuple[int, ...]
    first: int
    """Offset in elements."""


@dataclass(frozen=True)
class SlotSpec:
    """The layout of a slot: the states of all layers, then their journals."""

    layers: tuple[State | None, ...]
    """One per layer of the model; None for a layer without a state."""
    dtype: torch.dtype = torch.float32
    journal_rows: int = 0
    """Maximum number of drafts of a sequence in a step."""

    @property
    def parts(self) -> list[_Part]:
        parts, first = [], 0
        alignment = SLOT_ALIGNMENT // self.dtype.itemsize
        for in_journal in (False, True):
            for index, state in enumerate(self.layers):
                for name, shape in self._shapes(state, in_journal) if state else ():
                    parts.append(_Part(index, name, shape, first))
                    first += -(-torch.Size(shape).numel() // alignment) * alignment
        return parts

    def _shapes(self, state: State, in_journal: bool) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parts of one layer that have elements."""
        rows = self.journal_rows
        shapes: dict[str, tuple[int, ...]]
        if in_journal:
            shapes = {
                "journal_inputs": (rows if state.kernel > 1 else 0, state.channels),
                "journal": (rows, state.heads, state.journal_dim),
            }
        else:
            shapes = {
                "inputs": (state.kernel - 1, state.channels),
                "matrix": (state.heads, state.key_dim, state.value_dim),
            }
        return [(name, shape) for name, shape in shapes.items() if torch.Size(shape).numel()]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a slot, without its journal."""
        return self._end("inputs", "matrix")

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot; 0 for a model without states."""
        num_bytes = self._end("inputs", "matrix", "journal_inputs", "journal")
        return max(num_bytes, SLOT_ALIGNMENT if any(self.layers) else 0)

    def _end(self, *names: str) -> int:
        ends = [part.first + torch.Size(part.shape).numel() for part in self.parts if part.name in names]
        return -(-max(ends, default=0) * self.dtype.itemsize // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def reserve(self, num_slots: int) -> Tensor:
        """Reserves `[num_slots, slot_bytes / itemsize]` of `dtype` with undefined contents. Memory becomes resident
        when a slot is written. Raises OSError if no address space is left."""
        memory = reserve(num_slots * self.slot_bytes, huge_pages=True)
        return torch.frombuffer(memory, dtype=self.dtype).view(num_slots, -1)

    def views(self, memory: Tensor) -> list[StateSlots | None]:
        """Views of `memory` (from `reserve`) as the slots of each layer."""
        found: list[dict[str, Tensor]] = [{} for _ in self.layers]
        for part in self.parts:
            flat = memory[:, part.first : part.first + torch.Size(part.shape).numel()]
            found[part.layer][part.name] = flat.unflatten(1, part.shape)
        names = ("inputs", "matrix", "journal_inputs", "journal")
        return [
            StateSlots(state, **{name: views.get(name) for name in names}) if state else None
            for state, views in zip(self.layers, found)
        ]
