"""Routing and the sum over experts of `pace.ops.reference`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pace.ops.experts import ClampedSwiglu, Router
from pace.ops.protocol import ExpertOptions


def route(
    logits: Tensor, router: Router, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> Tensor:
    k = router.top_k
    chosen, weights = (
        _sparsemixer(logits, router) if router.score == "sparsemixer" else _best(logits, router, choice_bias)
    )
    chosen, order = chosen.sort(-1)
    weights = weights.gather(-1, order)
    if expert_scale is not None:
        weights = weights * expert_scale.to(weights.dtype)[chosen]
    spoilt = (logits.sigmoid() if router.score == "sigmoid" else logits).isnan().any(-1, keepdim=True)
    if router.score == "softmax":
        spoilt = logits.softmax(-1).isnan().any(-1, keepdim=True)
    chosen = torch.where(spoilt, torch.arange(k), chosen)
    return torch.cat([chosen.to(logits.dtype), weights.masked_fill(spoilt, math.nan)], -1)


def _best(logits: Tensor, router: Router, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the chosen experts `[T, k]`, best first, and their weights."""
    scores = {"softmax": lambda: logits.softmax(-1), "sigmoid": logits.sigmoid}.get(router.score, lambda: logits)()
    keys = scores if choice_bias is None else scores + choice_bias.to(scores.dtype)
    if router.groups > 1:
        grouped = keys.unflatten(-1, (router.groups, -1))
        group_keys = grouped.amax(-1) if router.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
        kept = group_keys.sort(dim=-1, descending=True, stable=True).indices[:, : router.kept_groups]
        lost = torch.ones_like(group_keys, dtype=torch.bool).scatter(-1, kept, False)
        keys = grouped.masked_fill(lost[..., None], -math.inf).flatten(-2)
    chosen = keys.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]
    weights = scores.gather(-1, chosen)
    if router.score == "softmax_of_chosen":
        weights = weights.softmax(-1)
    elif router.score == "sigmoid_of_chosen":
        weights = weights.sigmoid()
    if router.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + router.eps).clamp(min=router.least_sum)
    return chosen, weights * router.scale


def _sparsemixer(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    chosen, weights, left = [], [], logits
    for _ in range(2):
        best = left.sort(dim=-1, descending=True, stable=True).indices[:, :1]
        top = logits.gather(-1, best)
        far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * router.jitter
        weights.append(left.masked_fill(far, -math.inf).softmax(-1).gather(-1, best))
        chosen.append(best)
        left = left.scatter(-1, best, -math.inf)
    return torch.cat(chosen, -1), torch.cat(weights, -1)


def sum_of_experts(
    linear: Callable[..., Tensor],
    linear_glu: Callable[[Tensor, Any, str | ClampedSwiglu, Tensor | None], Tensor],
    x: Tensor,
    gate_up: Any,
    down: Any,
    routing: Tensor,
    options: ExpertOptions,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes `ForwardOps.experts` for stacks of any kind of weight, given its two products:
    `linear(x, weight, bias, activation=None)` and `linear_glu(x, weight, activation, bias)`."""
    k = routing.shape[1] // 2
    out = torch.zeros_like(x) if residual is None else residual.clone()
    for expert in routing[:, :k].unique().long().tolist():
        rows, place = (routing[:, :k] == expert).nonzero(as_tuple=True)
        weights = routing[rows, k + place][:, None]
        biases = [None if bias is None else bias[expert] for bias in (options.gate_up_bias, options.down_bias)]
        y = weights * x[rows] if options.weigh_inputs else x[rows]
        if gate_up.glu:
            y = linear_glu(y, gate_up.experts[expert], options.activation, biases[0])
        else:
            y = linear(y, gate_up.experts[expert], biases[0], options.activation)
        y = linear(y, down.experts[expert], biases[1])
        out[rows] += y if options.weigh_inputs else weights * y
    return out
