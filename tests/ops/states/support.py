"""Layers with a state, random steps of sequences, and the two operations on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
from torch import Tensor

from pace.ops.protocol import RecurrenceOptions
from pace.states import SlotSpec, State, StateSlots, StateSpans

JOURNAL_ROWS = 4


def slots_of(state: State, num_slots: int = 8, rows: int = JOURNAL_ROWS, dtype: torch.dtype = torch.float32):
    """Slots that hold NaN: what a step reads without having written it is seen."""
    spec = SlotSpec((state,), dtype, rows)
    memory = torch.full((num_slots, spec.slot_bytes // dtype.itemsize), torch.nan, dtype=dtype)
    return spec.views(memory)[0]


@dataclass(frozen=True)
class Span:
    """Tokens `first .. last` of a sequence, and the slots that it reads and writes."""

    first: int
    last: int
    read: int
    write: int
    certain: int | None = None
    """None for all tokens."""
    replay: int = 0
    marks: tuple[tuple[int, int], ...] = ()
    sequence: int = 0

    @property
    def count(self) -> int:
        return self.last - self.first


def state_spans(spans: Sequence[Span]) -> StateSpans:
    def vector(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def ends(counts: Sequence[int]) -> Tensor:
        return vector([0, *torch.tensor(counts).cumsum(0).tolist()])

    marks = [mark for span in spans for mark in span.marks]
    return StateSpans(
        ends([span.count for span in spans]),
        vector([span.read for span in spans]),
        vector([span.replay for span in spans]),
        vector([span.write for span in spans]),
        vector([span.count if span.certain is None else span.certain for span in spans]),
        ends([len(span.marks) for span in spans]),
        vector([row for row, _ in marks]),
        vector([slot for _, slot in marks]),
    )


@dataclass(frozen=True)
class Layer:
    """A layer with a state: `call(ops, arguments, slots, spans)` is its operation, and `arguments` are those of several
    sequences, one row for each token."""

    state: State
    arguments: list[list[Tensor]]
    call: Callable[[ModuleType, list[Tensor], StateSlots, StateSpans], Tensor]
    options: RecurrenceOptions | None = field(default=None)

    def run(self, ops: ModuleType, slots: StateSlots, *spans: Span) -> list[Tensor]:
        """One step; returns the rows of each span."""
        parts = [[part[span.first : span.last] for part in self.arguments[span.sequence]] for span in spans]
        joined = [torch.cat(rows) for rows in zip(*parts)]
        return list(self.call(ops, joined, slots, state_spans(spans)).split([span.count for span in spans]))

    def doubled(self) -> Layer:
        return replace(self, arguments=[[part.double() for part in parts] for parts in self.arguments])


def convolution(
    channels: int, kernel: int, tokens: int, bias: bool = True, activation: str | None = "silu", sequences: int = 1
) -> Layer:
    generator = torch.Generator().manual_seed(channels)
    weight = torch.randn(channels, kernel, generator=generator)
    biases = torch.randn(channels, generator=generator) if bias else None

    def call(ops: ModuleType, arguments: list[Tensor], slots: StateSlots, spans: StateSpans) -> Tensor:
        return ops.causal_conv(*arguments, weight, biases, activation, slots, spans)

    inputs = [[torch.randn(tokens, channels, generator=generator)] for _ in range(sequences)]
    return Layer(State(channels=channels, kernel=kernel), inputs, call)


def recurrence(
    heads: tuple[int, int],
    dims: tuple[int, int],
    tokens: int,
    delta: bool = True,
    tiled: bool = False,
    per_row: bool = False,
    skip: bool = False,
    sequences: int = 1,
    rate: float = 1.0,
    limits: tuple[float, float] = (0.0, float("inf")),
    lower_bound: float = 0.0,
) -> Layer:
    """`heads`: of keys, and of values; `dims`: of keys, and of values."""
    generator = torch.Generator().manual_seed(tokens)
    (key_heads, num_heads), (key_dim, value_dim) = heads, dims

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    decay_dim = key_dim if per_row else 1
    state = State(heads=num_heads, key_dim=key_dim, value_dim=value_dim, decay_dim=decay_dim)
    options = RecurrenceOptions(
        rates=-rate * torch.rand(num_heads, generator=generator),
        step_bias=random(num_heads * decay_dim),
        delta=delta,
        tiled=tiled,
        beta_scale=2.0 if per_row else 1.0,
        skip=random(num_heads) if skip else None,
        lower_bound=lower_bound,
        step_limits=limits,
    )

    def call(ops: ModuleType, arguments: list[Tensor], slots: StateSlots, spans: StateSpans) -> Tensor:
        q, k, v, steps, *beta = arguments
        return ops.recurrence(q, k, v, steps, beta[0] if beta else None, slots, spans, options)

    arguments = []
    for _ in range(sequences):
        # Heads, and elements of gates, are parts of wider rows, as those of one fused product.
        keys = random(tokens, key_heads, 2 * key_dim + 3)
        values = random(tokens, num_heads + 1, value_dim)[:, 1:]
        gates = random(tokens, num_heads * (decay_dim + 1))
        parts = [keys[..., :key_dim], keys[..., key_dim : 2 * key_dim], values, gates[:, : num_heads * decay_dim]]
        arguments.append([*parts, gates[:, num_heads * decay_dim :]] if delta else parts)
    return Layer(state, arguments, call, options)


def states_equal(slots: StateSlots, a: int, b: int) -> bool:
    """True if two slots hold the same bits, apart from their journals."""
    return all(torch.equal(part[a], part[b]) for part in (slots.inputs, slots.matrix) if part is not None)
