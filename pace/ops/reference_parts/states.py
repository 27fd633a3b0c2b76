"""Operations on states in plain torch: the specification of the native ones. `StateSpans` has the order of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from pace.ops.protocol import UNIT_EPS, RecurrenceOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pace.states import StateSlots, StateSpans

GATES = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "softplus": functional.softplus,
}


def gate_(x: Tensor, gate: Tensor, activation: str | None = "sigmoid") -> None:
    values = gate if activation is None else GATES[activation](gate)
    x.mul_(values.repeat_interleave(x.shape[1] // gate.shape[1], 1))


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, activation: str, norm_first: bool
) -> Tensor:
    gate = GATES[activation](gate)
    y = (x if norm_first else x * gate).unflatten(1, (groups, -1))
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).flatten(1)
    y = y * weight.to(x.dtype).repeat(x.shape[1] // weight.shape[0])
    return y * gate if norm_first else y


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, slots: StateSlots, spans: StateSpans
) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    before = weight.shape[1] - 1
    for s, tokens, read, replay, write, certain in _of_spans(spans):
        past = x.new_zeros(before, x.shape[1])
        if before and read >= 0:
            past = slots.inputs[read].to(x.dtype)
            if replay:
                past = torch.cat([past, slots.journal_inputs[read, :replay].to(x.dtype)])[-before:]
        inputs = torch.cat([past, x[tokens]])  # token t of the span is row `before + t`
        y = sum(weight[:, j].to(x.dtype) * inputs[j : len(inputs) - before + j] for j in range(before + 1))
        y = y if bias is None else y + bias.to(x.dtype)
        out[tokens] = functional.silu(y) if activation == "silu" else y
        if before:
            for row, slot in [(certain, write), *_marks(spans, s)]:
                slots.inputs[slot] = inputs[row : row + before]
            drafts = x[tokens][certain:]
            if len(drafts):
                slots.journal_inputs[write, : len(drafts)] = drafts
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
    q, k = (_of_value_heads(heads, v.shape[1], options) for heads in (q, k))
    if options.delta:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
    inputs = (steps + options.step_bias.to(v.dtype)).unflatten(1, (v.shape[1], -1))  # [T, H, 1 or Dk]
    steps, rates = functional.softplus(inputs).clamp(*options.step_limits), options.rates.to(v.dtype)[:, None]
    bounded = options.lower_bound < 0
    decays = torch.exp(options.lower_bound * torch.sigmoid(-rates * inputs) if bounded else rates * steps)
    betas = None if beta is None else options.beta_scale * beta.sigmoid()
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for s, tokens, read, replay, write, certain in _of_spans(spans):
        matrix = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        if read >= 0:
            matrix = slots.matrix[read].to(v.dtype)
            for row in range(replay):
                decay, key, delta = (
                    slots.journal[read, row].to(v.dtype).split((slots.state.decay_dim, k.shape[2], v.shape[2]), -1)
                )
                matrix = _updated(matrix, decay, key, delta)
        written: dict[int, list[int]] = {certain: [write]}
        for row, slot in _marks(spans, s):
            written.setdefault(row, []).append(slot)
        for count, t in enumerate(range(tokens.start, tokens.stop)):
            if options.delta:
                known = ((decays[t, :, :, None] * matrix) * k[t, :, :, None]).sum(1)
                delta = betas[t, :, None] * (v[t] - known)
            else:
                delta = steps[t] * v[t]
            matrix = _updated(matrix, decays[t], k[t], delta)
            out[t] = (matrix * q[t, :, :, None]).sum(1)
            for slot in written.get(count + 1, ()):
                slots.matrix[slot] = matrix
            if count >= certain:
                slots.journal[write, count - certain] = torch.cat([decays[t], k[t], delta], -1)
    if options.skip is not None:
        out += options.skip.to(v.dtype)[:, None] * v
    return out.flatten(1)


def _updated(matrix: Tensor, decay: Tensor, key: Tensor, delta: Tensor) -> Tensor:
    """One step of the matrices `[H, Dk, Dv]`, with `decay [H, 1 or Dk]`, `key [H, Dk]` and `delta [H, Dv]`."""
    return decay[:, :, None] * matrix + key[:, :, None] * delta[:, None]


def _of_value_heads(x: Tensor, num_heads: int, options: RecurrenceOptions) -> Tensor:
    """Repeats key heads `[T, Hk, D]` for the value heads that read them: `[T, num_heads, D]`."""
    times = num_heads // x.shape[1]
    return x.repeat(1, times, 1) if options.tiled else x.repeat_interleave(times, 1)


def _of_spans(spans: StateSpans) -> Iterator[tuple[int, slice, int, int, int, int]]:
    """Yields the index of each span, its tokens, and its entries `read`, `replay`, `write` and `certain`."""
    starts = spans.query_start.tolist()
    entries = zip(*(part.tolist() for part in (spans.read, spans.replay, spans.write, spans.certain)))
    for s, (read, replay, write, certain) in enumerate(entries):
        yield s, slice(starts[s], starts[s + 1]), read, replay, write, certain


def _marks(spans: StateSpans, s: int) -> list[tuple[int, int]]:
    """(tokens before the mark, slot) of each mark of span s."""
    begin, end = spans.mark_start[s : s + 2].tolist()
    return list(zip(spans.mark_rows[begin:end].tolist(), spans.mark_slots[begin:end].tolist()))
