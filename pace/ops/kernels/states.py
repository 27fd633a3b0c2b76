"""Causal convolutions and recurrences on the C++ kernels (csrc/kernels/states.inl): checks, then one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pace import _C
from pace.ops.checks import check_heads, check_rows, check_vector, describe
from pace.ops.protocol import RecurrenceOptions

if TYPE_CHECKING:
    from pace.states import State, StateSlots, StateSpans

CONVOLUTION_ACTIVATIONS = (None, "silu")


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, slots: StateSlots, spans: StateSpans
) -> Tensor:
    """Numerics: fp32, in the order of the protocol. A weight whose transpose is contiguous is read without a copy."""
    tokens, channels = check_rows("x", x)
    weight = convolution_weight(slots.state, channels, weight, bias, activation)
    check_slots(slots)
    check_spans(spans)
    out = torch.empty(tokens, channels)
    _C.causal_conv(x, weight, bias, activation == "silu", slots, spans, out)
    return out


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Tensor,
    beta: Tensor | None,
    slots: StateSlots,
    spans: StateSpans,
    options: RecurrenceOptions,
) -> Tensor:
    """Numerics: fp32, token by token. A token's bits depend only on its state and its own arguments."""
    state = slots.state
    tokens, heads, value_dim = check_heads("v", v)
    _, key_heads, key_dim = check_heads("q", q)
    if q.shape != k.shape or check_heads("k", k)[0] != tokens:
        raise ValueError(f"q and k must be float32 [{tokens}, Hk, {state.key_dim}]; got {describe(q)}, {describe(k)}")
    check_recurrence(state, options, (heads, value_dim), (key_heads, key_dim), beta is not None)
    for name, columns, tensor in (("steps", heads * state.decay_dim, steps), ("beta", heads, beta)):
        if tensor is not None and check_rows(name, tensor) != (tokens, columns):
            raise ValueError(f"{name} must be float32 [{tokens}, {columns}]; got {describe(tensor)}")
    check_slots(slots)
    check_spans(spans)
    out = torch.empty(tokens, heads * value_dim)
    _C.recurrence(q, k, v, steps, beta, slots, spans, options, out)
    return out


# -- checks that recorded operations share


def convolution_weight(
    state: State, channels: int, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Returns the weight as contiguous `[L, C]`, the order in which the kernel reads it. Raises ValueError unless it is
    that of the state."""
    if channels != state.channels:
        raise ValueError(f"x must be float32 [T, {state.channels}] for this state; got {channels} columns")
    if weight.dtype != torch.float32 or weight.shape != (channels, state.kernel):
        raise ValueError(f"weight must be float32 [{channels}, {state.kernel}] for this state; got {describe(weight)}")
    if bias is not None:
        check_vector("bias", bias, channels)
    if activation not in CONVOLUTION_ACTIVATIONS:
        raise ValueError(f"the activation of a convolution is silu or None; got {activation!r}")
    return weight.t().contiguous()


def check_recurrence(
    state: State, options: RecurrenceOptions, values: tuple[int, int], keys: tuple[int, int], has_beta: bool
) -> None:
    """Raises ValueError unless `(heads, elements)` of values and of keys fit the state and the options."""
    if values != (state.heads, state.value_dim):
        raise ValueError(f"v must be [T, {state.heads}, {state.value_dim}] for this state; got {values}")
    if keys[1] != state.key_dim or keys[0] < 1 or state.heads % keys[0]:
        raise ValueError(
            f"q and k must be [T, Hk, {state.key_dim}] for this state, where Hk divides {state.heads}; got {keys}"
        )
    if has_beta != options.delta:
        raise ValueError(f"beta is given for the delta rule, and only for it; got delta={options.delta}")
    if state.decay_dim > 1 and not options.delta:
        raise ValueError(f"without the delta rule a head has one decay; the state has {state.decay_dim}")
    check_vector("rates", options.rates, state.heads)
    check_vector("step_bias", options.step_bias, state.heads * state.decay_dim)
    if options.skip is not None:
        check_vector("skip", options.skip, state.heads)


def check_slots(slots: StateSlots) -> None:
    """Raises ValueError unless all parts are float32 with the shapes of the state, contiguous in a slot, and at the
    same distance between slots."""
    state = slots.state
    shapes = {
        "inputs": (state.kernel - 1, state.channels),
        "matrix": (state.heads, state.key_dim, state.value_dim),
        "journal_inputs": (-1, state.channels),
        "journal": (-1, state.heads, state.journal_dim),
    }
    strides, rows = set(), set()
    for name, shape in shapes.items():
        part = getattr(slots, name)
        if part is None:
            if -1 not in shape and torch.Size(shape).numel():
                raise ValueError(f"the slots of {state} need {name}; got None")
            continue
        if shape[0] == -1:
            rows.add(part.shape[1])
            shape = (part.shape[1], *shape[1:])
        if part.dtype != torch.float32 or part.shape[1:] != shape or not part[:1].is_contiguous():
            raise ValueError(f"{name} must be float32 {['slots', *shape]}, contiguous in a slot; got {describe(part)}")
        strides.add((len(part), part.stride(0) if len(part) > 1 else 0))
    if len(strides) > 1 or len(rows) > 1:
        raise ValueError("the parts of slots must be views of one memory, with equal strides and rows of the journal")


def check_spans(spans: StateSpans) -> None:
    """Raises ValueError unless all parts are contiguous int32 of matching lengths."""
    count, marks = len(spans.read), len(spans.mark_slots)
    for name in ("query_start", "mark_start"):
        check_vector(name, getattr(spans, name), count + 1, torch.int32)
    for name in ("read", "replay", "write", "certain"):
        check_vector(name, getattr(spans, name), count, torch.int32)
    for name in ("mark_rows", "mark_slots"):
        check_vector(name, getattr(spans, name), marks, torch.int32)
