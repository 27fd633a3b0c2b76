"""Both operations have the same bits however a sequence is cut into steps, batches, drafts and threads."""

from __future__ import annotations

import pytest
import torch

from pace import _C
from pace.ops import native
from tests.ops.isas import on_each_isa
from tests.ops.states.support import JOURNAL_ROWS, Span, convolution, recurrence, slots_of, states_equal

TOKENS = 41

LAYERS = {
    "convolution": lambda: convolution(70, 4, TOKENS, sequences=3),
    "wide convolution": lambda: convolution(1100, 7, TOKENS, bias=False, activation=None, sequences=3),
    "delta rule": lambda: recurrence((2, 6), (24, 40), TOKENS, sequences=3),
    "decay per row": lambda: recurrence((2, 2), (16, 33), TOKENS, per_row=True, sequences=3),
    "Mamba-2": lambda: recurrence((1, 4), (20, 48), TOKENS, delta=False, skip=True, sequences=3),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]()


@on_each_isa
def test_steps(layer) -> None:
    """Slot 0 is written at once. Slots 1 and 2 take turns over steps of other lengths; 3 is read and written."""
    slots = slots_of(layer.state)
    whole = layer.run(native, slots, Span(0, TOKENS, -1, 0))[0]
    for lengths in ((1,) * TOKENS, (2, 1, 3, 17, 18), (7, 34), (40, 1)):
        for turns in ((1, 2), (3, 3)):
            read, rows, first = -1, [], 0
            for step, length in enumerate(lengths):
                write = turns[step % 2]
                rows += layer.run(native, slots, Span(first, first + length, read, write))
                read, first = write, first + length
            assert torch.equal(torch.cat(rows), whole), (lengths, turns)
            assert states_equal(slots, read, 0), (lengths, turns)


@on_each_isa
def test_batches_and_threads(layer) -> None:
    """A prefill, a chunk and a decode of three sequences; the slot that two of them read stays as it was."""
    alone = slots_of(layer.state)
    expected = [layer.run(native, alone, Span(0, 20, -1, s, sequence=s))[0] for s in range(3)]
    expected += [
        layer.run(native, alone, Span(20, 21, 0, 3))[0],
        layer.run(native, alone, Span(20, 40, 0, 4))[0],
        layer.run(native, alone, Span(0, TOKENS, -1, 5, sequence=1))[0],
    ]
    for threads in (1, 2, 3):
        _C.set_num_threads(threads)
        slots = slots_of(layer.state)
        rows = layer.run(native, slots, *(Span(0, 20, -1, s, sequence=s) for s in range(3)))
        rows += layer.run(native, slots, Span(20, 21, 0, 3), Span(20, 40, 0, 4), Span(0, TOKENS, -1, 5, sequence=1))
        for row, (got, wanted) in enumerate(zip(rows, expected)):
            assert torch.equal(got, wanted), (threads, row)
        for part, wanted in zip((slots.inputs, slots.matrix), (alone.inputs, alone.matrix)):
            assert part is None or torch.equal(part[:6], wanted[:6]), threads


@pytest.mark.parametrize("turns", [(1, 2), (3, 3)])
@on_each_isa
def test_drafts(layer, turns) -> None:
    """Every step has drafts, and every number of them is accepted in turn. Rejected tokens are those of another
    sequence."""
    slots = slots_of(layer.state)
    whole = layer.run(native, slots, Span(0, TOKENS, -1, 0))[0]
    read, accepted, at, rows = -1, 0, 0, []
    while at < TOKENS:
        certain = min(1 + at % 3, TOKENS - at)
        drafts = min(JOURNAL_ROWS, TOKENS - at - certain)
        keeps = min(at % (JOURNAL_ROWS + 1), drafts)
        good = at + certain + keeps
        mixed = [torch.cat([own[at:good], other[: drafts - keeps]]) for own, other in zip(*layer.arguments[:2])]
        layer.arguments.append(mixed)
        write = turns[len(rows) % 2]
        span = Span(0, certain + drafts, read, write, certain, accepted, sequence=len(layer.arguments) - 1)
        rows.append(layer.run(native, slots, span)[0][: certain + keeps])
        layer.arguments.pop()
        read, accepted, at = write, keeps, good
    assert torch.equal(torch.cat(rows), whole)
    last = layer.run(native, slots, Span(0, 1, read, 4, replay=accepted, sequence=2))[0]
    assert torch.equal(last, layer.run(native, slots, Span(0, 1, 0, 5, sequence=2))[0])
    assert states_equal(slots, 4, 5)


@on_each_isa
def test_marks(layer) -> None:
    """A mark has the state of a sequence that ended there, also where two marks are at one token, or at the last."""
    slots = slots_of(layer.state, 10)
    marks = ((1, 1), (3, 2), (3, 3), (19, 4), (20, 5))
    layer.run(native, slots, Span(0, 24, -1, 0, certain=20, marks=marks))
    for row, slot in (*marks, (20, 0)):
        layer.run(native, slots, Span(0, row, -1, 9))
        assert states_equal(slots, slot, 9), row
    layer.run(native, slots, Span(0, 1, -1, 7, marks=((1, 8),)))
    layer.run(native, slots, Span(1, 2, 7, 7, marks=((1, 6),)))
    layer.run(native, slots, Span(0, 2, -1, 9))
    assert states_equal(slots, 7, 9) and states_equal(slots, 6, 9)


@pytest.mark.skipif("avx2" not in _C.available_isas(), reason="needs two tables with FMA")
def test_tables_with_fma_have_the_same_bits(layer) -> None:
    found = []
    for isa in _C.available_isas():
        if isa == "generic":
            continue
        _C.select_isa(isa)
        slots = slots_of(layer.state)
        found.append((isa, layer.run(native, slots, Span(0, TOKENS, -1, 0))[0], slots))
    for isa, rows, slots in found[1:]:
        assert torch.equal(rows, found[0][1]), isa
        assert slots.matrix is None or torch.equal(slots.matrix[0], found[0][2].matrix[0]), isa
