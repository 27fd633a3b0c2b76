"""Programs of a model with states give the bits of the kernels called one by one, and check slots before they run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pace import _C
from pace.batch import ForwardBatch, KVSpec, Positions, Spans
from pace.graph import Program
from pace.ops import native
from pace.ops.protocol import AttentionOptions, RecurrenceOptions
from pace.states import State
from tests.ops.states.support import Span, state_spans
from tests.support import isas_of_floats

pytestmark = pytest.mark.usefixtures("restore_isa_and_threads")

WIDTH, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, VOCABULARY = 24, 2, 4, 8, 12, 30
KEYS, VALUES = KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM
CHANNELS = 2 * KEYS + VALUES
JOURNAL_ROWS = 3


class Model:
    """A gated convolution, attention, the delta rule, and Mamba-2."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(n: int, k: int):
            packed = native.empty_weight(n, k, torch.float32)
            native.pack_rows_(packed, torch.randn(n, k, generator=generator) / k**0.5, 0)
            return packed

        delta = State(channels=CHANNELS, kernel=4, heads=HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM)
        self.kv_spec = KVSpec(
            (State(channels=WIDTH, kernel=3), Positions(2, 12, 12), None, delta, delta), torch.float32
        )
        self.table, self.head = weight(VOCABULARY, WIDTH), weight(VOCABULARY, WIDTH)
        self.qkv, self.wide = weight(48 + 24, WIDTH), weight(CHANNELS + VALUES + 2 * HEADS, WIDTH)
        self.out, self.of_values = weight(WIDTH, 24), weight(WIDTH, VALUES)
        self.narrow = torch.randn(WIDTH, 3, generator=generator)
        self.filter, self.bias = (
            torch.randn(CHANNELS, 4, generator=generator),
            torch.randn(CHANNELS, generator=generator),
        )
        self.norm = torch.ones(VALUES)
        self.options = RecurrenceOptions(-torch.rand(HEADS, generator=generator), torch.zeros(HEADS), delta=True)
        self.of_mamba = replace(self.options, delta=False, tiled=True, skip=torch.ones(HEADS))

    def compute(self, ops, batch, angles):
        x = ops.embedding(batch.tokens, self.table)
        ops.gate_(x, x[:, :3], None)
        x = x + ops.causal_conv(x, self.narrow, None, None, batch.kv[0], batch.states)
        x = x + self.attend(ops, x, batch)
        for layer, options in ((3, self.options), (4, self.of_mamba)):
            x = self.mix(ops, x, batch, batch.kv[layer], options)
        return ops.linear(x[batch.logit_rows], self.head, activation="relu2")

    def attend(self, ops, x, batch):
        qkv, kv = ops.linear(x, self.qkv), batch.kv[1]
        q, k, v = (qkv[:, 24 * i : 24 * i + 24].unflatten(1, (2, 12)) for i in range(3))
        ops.store_kv(k, v, kv, batch.slots)
        return ops.linear(ops.attention(q, kv, batch.spans, AttentionOptions(0.3)), self.out)

    def mix(self, ops, x, batch, slots, options):
        wide = ops.linear(x, self.wide)
        mixed = ops.causal_conv(wide[:, :CHANNELS], self.filter, self.bias, "silu", slots, batch.states)
        q, k = (mixed[:, KEYS * i : KEYS * (i + 1)].unflatten(1, (KEY_HEADS, KEY_DIM)) for i in range(2))
        v = mixed[:, 2 * KEYS :].unflatten(1, (HEADS, VALUE_DIM))
        gate, steps = wide[:, CHANNELS : CHANNELS + VALUES], wide[:, CHANNELS + VALUES : CHANNELS + VALUES + HEADS]
        beta = wide[:, CHANNELS + VALUES + HEADS :] if options.delta else None
        y = ops.recurrence(q, k, v, steps, beta, slots, batch.states, options)
        y = ops.gated_norm(y, gate, self.norm, 1e-5, HEADS, "silu", options.delta)
        ops.gate_(y, steps, "softplus")
        return ops.linear(y, self.of_values, residual=x)


class Sequences:
    """The cache of a model, and batches of two sequences, one block of positions each."""

    def __init__(self, spec: KVSpec) -> None:
        self.kv = spec.allocate(4)
        slots = spec.slots(JOURNAL_ROWS)
        self.memory = torch.zeros(5, slots.slot_bytes // 4)
        self.kv = [state or kv for state, kv in zip(slots.views(self.memory), self.kv)]

    def batch(self, *spans: Span) -> ForwardBatch:
        def integers(values, dtype=torch.int64):
            return torch.tensor(values, dtype=dtype)

        positions = [position for span in spans for position in range(span.first, span.last)]
        owners = [span.sequence for span in spans for _ in range(span.count)]
        tokens = [(7 * position + 3 * owner) % VOCABULARY for position, owner in zip(positions, owners)]
        states = state_spans(spans)
        blocks = Spans(
            states.query_start,
            integers([span.last for span in spans], torch.int32),
            integers([[span.sequence] for span in spans], torch.int32),
        )
        slots = [16 * owner + position for position, owner in zip(positions, owners)]
        rows = integers(range(len(tokens)))
        return ForwardBatch(
            integers(tokens), integers(positions), rows, blocks, integers(slots), rows, self.kv, states=states
        )


STEPS = (
    (Span(0, 5, -1, 0, marks=((2, 4),)), Span(0, 1, -1, 1, sequence=1)),
    (Span(5, 8, 0, 2, certain=1), Span(1, 9, 1, 1, sequence=1)),
    (Span(7, 9, 2, 2, certain=1, replay=1), Span(9, 10, 1, 3, sequence=1)),
)


@pytest.mark.parametrize("optimise", [True, False])
def test_steps_have_the_bits_of_single_operations(optimise) -> None:
    model = Model()
    for isa in isas_of_floats():
        _C.select_isa(isa)
        program = Program(model, model.kv_spec.layers, (), optimise)
        ours, theirs = Sequences(model.kv_spec), Sequences(model.kv_spec)
        for spans in STEPS:
            got = program.run(ours.batch(*spans), ())
            assert torch.equal(got, model.compute(native, theirs.batch(*spans), None)), isa
            assert torch.equal(ours.memory, theirs.memory), isa


def test_slots_are_checked_before_anything_runs() -> None:
    model = Model()
    program = Program(model, model.kv_spec.layers, ())
    sequences = Sequences(model.kv_spec)
    for message, batch in (
        ("it writes slot 5", sequences.batch(Span(0, 2, -1, 5))),
        ("it has 4 drafts", sequences.batch(Span(0, 5, -1, 0, certain=1))),
        ("the batch has no `states`", replace(sequences.batch(Span(0, 2, -1, 0)), states=None)),
    ):
        with pytest.raises(ValueError, match=message):
            program.run(batch, ())
    assert not sequences.memory.any()


def test_what_a_recording_refuses() -> None:
    model = Model()
    for message, field, value in (
        ("weight must be float32 \\[24, 3\\]", "narrow", torch.ones(24, 4)),
        ("step_bias must be", "options", replace(model.options, step_bias=torch.zeros(3))),
        ("weight must be a contiguous vector", "norm", torch.ones(5)),
    ):
        broken = Model()
        setattr(broken, field, value)
        with pytest.raises(ValueError, match=message):
            Program(broken, model.kv_spec.layers, ())
