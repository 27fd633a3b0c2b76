"""Sampling operations in plain torch: the part of `pace.ops.reference` that works on rows of logits `[R, V]`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pace.ops.draws import Drawn, Draws
from pace.ops.rules import Rules


def argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1).where(logits.amax(-1).isfinite(), -1)


def top_k_top_p_(logits: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Sets to -inf in `logits [R, V]` all but the `top_k[r]` largest, then all but the nucleus of mass `top_p[r]` among
    those.

    `k = 0` and `p >= 1` are off. Values equal to the k-th largest stay. Words are ordered by falling logit, then by
    rising index. The nucleus holds the words with a probability of less than p before them; the first is always in
    it."""
    vocab_size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long()
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, k[:, None] - 1), -math.inf)
    probability = ordered.double().softmax(-1)
    mass_before = probability.cumsum(-1) - probability
    outside = (mass_before >= top_p[:, None]) & (top_p[:, None] < 1)
    outside[:, 0] = False
    logits.scatter_(-1, order, ordered.masked_fill(outside, -math.inf))


def apply_mask_(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    allowed = (mask[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
    banned = allowed.flatten(1)[:, : logits.shape[1]] == 0
    rows = torch.arange(logits.shape[0]) if rows is None else rows
    logits[rows] = logits[rows].masked_fill(banned, -math.inf)


def sample(logits: Tensor, draws: Draws) -> Drawn:
    """Draws a token for each of `draws`; -1 if its row holds NaN or +inf, or nothing above -inf. Returns
    log-probabilities where requested, of the row after its mask.

    Banned tokens become -inf, then x is edited. With `y = x / temperature`, a token has the weight `exp(y - max(y))`.
    top_k and top_p act as in `top_k_top_p_`; then weights below min_p are removed. typical_p keeps the tokens with the
    smallest `|log w - E[log w]|`, until they have typical_p of the mass, and those equal to the last. The drawn token
    is the first, in ascending order of ids, whose cumulative weight exceeds `uniform` of the total."""
    count = len(draws.rows)
    num_top = torch.full((count,), -1) if draws.num_top is None else draws.num_top
    max_top = max([0, *num_top.tolist()])
    tokens = torch.full((count,), -1, dtype=torch.int64)
    values = torch.full((0 if draws.num_top is None else count,), -math.inf)
    top, top_values = torch.full((len(values), max_top), -1), torch.full((len(values), max_top), -math.inf)
    for index, row in enumerate(draws.rows.tolist()):
        given = logits[row : row + 1].clone()
        if draws.masks is not None and draws.mask_rows[index] >= 0:
            apply_mask_(given, draws.masks[draws.mask_rows[index]][None])
        x = given[0].clone()
        for edits in draws.edits[index] if draws.edits is not None else ():
            edits.apply_(x.numpy())
        tokens[index] = token = _draw(x, draws, index)
        wanted = int(num_top[index])
        if wanted >= 0 and token >= 0:
            one = token_logprobs(given, torch.tensor([0]), torch.tensor([token]), wanted)
            values[index], top[index, :wanted], top_values[index, :wanted] = one[0][0], one[1][0], one[2][0]
    return Drawn(tokens, values, top, top_values)


def _draw(x: Tensor, draws: Draws, index: int) -> int:
    largest, rules = int(argmax(x[None])[0]), Rules(*draws.rules[index].item())
    if largest < 0 or not rules.temperature:
        return largest
    y = (x / rules.temperature)[None]
    top_k_top_p_(y, torch.tensor([rules.top_k]), torch.tensor([rules.top_p]))
    log_weights = (y[0] - y.max()).double()
    log_weights[log_weights.exp() < rules.min_p] = -math.inf
    if rules.typical_p < 1:
        keep_typical_(log_weights, rules.typical_p)
    cumulative = log_weights.exp().cumsum(0)
    place = torch.searchsorted(cumulative, float(draws.uniform[index]) * cumulative[-1], right=True)
    return min(int(place), int(log_weights.exp().nonzero()[-1]))


def keep_typical_(log_weights: Tensor, mass: float, num_spared: int = 1) -> None:
    """Sets to -inf in `log_weights [V]` all but the tokens whose information is closest to the entropy, up to `mass` of
    the probability (arXiv:2202.00666). Leaves at least `num_spared`."""
    probability = log_weights.softmax(0)
    level = (probability * log_weights).nansum()
    distance, order = (log_weights - level).abs().sort(stable=True)
    last = min(int((probability[order].cumsum(0) < mass).sum()), len(order) - 1)
    outside = distance > distance[last]
    outside[:num_spared] = False
    log_weights[order[outside]] = -math.inf


def token_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits[rows].log_softmax(-1)
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    missing = max(0, num_top - logits.shape[1])
    top = torch.nn.functional.pad(order[:, :num_top], (0, missing), value=-1)
    values = torch.nn.functional.pad(ordered[:, :num_top], (0, missing), value=-math.inf)
    return logprobs.gather(1, tokens[:, None])[:, 0], top, values
