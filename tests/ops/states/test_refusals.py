"""What does not fit is refused by name, before a slot is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pace.ops import native
from pace.states import State
from tests.ops.states.support import Layer, Span, convolution, recurrence, slots_of, state_spans

LAYERS: dict[str, Callable[[], Layer]] = {
    "convolution": lambda: convolution(8, 3, 9),
    "recurrence": lambda: recurrence((1, 2), (4, 4), 9),
}
SPANS = {
    "it reads slot 8; slots are numbered 0 to 7": Span(0, 3, 8, 0),
    "it reads slot -2": Span(0, 3, -2, 0),
    "it writes slot 8": Span(0, 3, 0, 8),
    "it writes slot -1": Span(0, 3, 0, -1),
    "0 tokens are certain; it must be 1 to its 3 tokens": Span(0, 3, 0, 0, certain=0),
    "4 tokens are certain": Span(0, 3, 0, 0, certain=4),
    "it has 5 drafts; the journal has 4 rows": Span(0, 6, 0, 0, certain=1),
    "it replays 5 rows of the journal of slot 0, which has 4": Span(0, 3, 0, 0, replay=5),
    "it replays -1 rows": Span(0, 3, 0, 0, replay=-1),
    "it replays 1 rows of the journal of slot -1, which has 0": Span(0, 3, -1, 0, replay=1),
    "a mark is after 3 tokens; marks ascend, from 1 to the 2 certain tokens": Span(
        0, 3, 0, 0, certain=2, marks=((3, 1),)
    ),
    "a mark is after 0 tokens": Span(0, 3, 0, 0, marks=((0, 1),)),
    "a mark is after 1 tokens": Span(0, 3, 0, 0, marks=((2, 1), (1, 2))),
    "a mark writes slot 8": Span(0, 3, 0, 0, marks=((1, 8),)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_spans(kind) -> None:
    layer = LAYERS[kind]()
    slots = slots_of(layer.state)
    for message, span in SPANS.items():
        for before in ((), (Span(0, 2, -1, 5),)):
            with pytest.raises(ValueError, match=f"span {len(before)}: {message}"):
                layer.run(native, slots, *before, span)
    parts = [part for part in (slots.inputs, slots.matrix) if part is not None]
    assert all(part.isnan().all() for part in parts)


@pytest.mark.parametrize("kind", LAYERS)
def test_records(kind) -> None:
    layer = LAYERS[kind]()
    slots = slots_of(layer.state)
    run = layer.call

    def with_spans(**parts):
        spans = {}
        layer_of = replace(layer, call=lambda ops, arguments, slots, found: spans.setdefault("found", found))
        with pytest.raises(AttributeError):
            layer_of.run(native, slots, Span(0, 3, -1, 0))
        return lambda: run(native, [part[:3] for part in layer.arguments[0]], slots, replace(spans["found"], **parts))

    def with_slots(**parts):
        return lambda: replace(layer).run(native, replace(slots, **parts), Span(0, 3, -1, 0))

    name = "inputs" if slots.inputs is not None else "matrix"
    part = getattr(slots, name)
    for message, call in (
        ("query_start must go from 0 to the 3 tokens", with_spans(query_start=torch.tensor([0, 2], dtype=torch.int32))),
        ("mark_start must go from 0 to the 0 marks", with_spans(mark_start=torch.tensor([0, 1], dtype=torch.int32))),
        ("read must be a contiguous vector of 1 torch.int32", with_spans(read=torch.tensor([0]))),
        ("write must be", with_spans(write=torch.zeros(2, dtype=torch.int32))),
        (f"need {name}; got None", with_slots(**{name: None})),
        (f"{name} must be float32", with_slots(**{name: part.double()})),
        (f"{name} must be float32", with_slots(**{name: part[..., :-1]})),
        ("views of one memory", with_slots(**{name: part[:5]})),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_arguments() -> None:
    conv, delta = convolution(8, 3, 9), recurrence((2, 4), (4, 6), 9)
    mamba = recurrence((1, 2), (4, 4), 9, delta=False)
    (x,), (q, k, v, steps, beta) = conv.arguments[0], delta.arguments[0]
    slots, of_delta = slots_of(conv.state), slots_of(delta.state)
    per_row = slots_of(State(heads=2, key_dim=4, value_dim=4, decay_dim=4))

    weights = torch.ones(8, 3)

    def convolve(x=x, weight=weights, bias=None, activation=None):
        return lambda: native.causal_conv(x, weight, bias, activation, slots, spans)

    def recur(q=q, k=k, v=v, steps=steps, beta=beta, options=delta.options):
        return lambda: native.recurrence(q, k, v, steps, beta, of_delta, spans, options)

    spans = state_spans([Span(0, 9, -1, 0)])
    for message, call in (
        ("x must be float32 \\[T, 8\\] for this state; got 7", convolve(x[:, :7])),
        ("weight must be float32 \\[8, 3\\]", convolve(weight=torch.ones(8, 4))),
        ("bias must be", convolve(bias=torch.ones(7))),
        ("the activation of a convolution is silu or None; got 'gelu'", convolve(activation="gelu")),
        ("v must be \\[T, 4, 6\\]", recur(v=v[:, :3])),
        ("q and k must be", recur(q=q[:, :1])),
        ("q and k must be", recur(q=q[..., :3], k=k[..., :3])),
        ("q and k must be", recur(q=q[:8], k=k[:8])),
        ("steps must be float32 \\[9, 4\\]", recur(steps=steps[:, :3])),
        ("beta must be float32 \\[9, 4\\]", recur(beta=beta[:8])),
        ("beta is given for the delta rule", recur(beta=None)),
        ("beta is given for the delta rule", recur(options=replace(delta.options, delta=False))),
        ("rates must be", recur(options=replace(delta.options, rates=torch.ones(3)))),
        ("step_bias must be", recur(options=replace(delta.options, step_bias=torch.ones(3)))),
        ("skip must be", recur(options=replace(delta.options, skip=torch.ones(3)))),
        (
            "without the delta rule a head has one decay; the state has 4",
            lambda: mamba.call(native, mamba.arguments[0], per_row, spans),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
