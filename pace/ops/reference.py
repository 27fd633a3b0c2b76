"""Every operation in plain torch: the specification of `pace.ops.native`, and the backend that tells a model bug from a
kernel bug.

Shapes use T tokens, N outputs, K inputs, H heads of D elements, R rows of logits over V words. Activations are in
float32, or in float64 where the weights are; weights in any float dtype are widened to the activations' dtype before
they are used, so that the only rounding is that of the stored weights. Names that end in `_` work in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from pace.ops import checks, weight_layout
from pace.ops.draws import Drawn, Draws
from pace.ops.quantizer import Quantizer
from pace.ops.weight_layout import AnyLayout, MixedLayout, QuantizedRows, WeightLayout

if TYPE_CHECKING:
    from pace.batch import KVBlocks, Spans

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x))),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
}


# ----------------------------------------------------------------------------------------------------------------
# weights


@dataclass(frozen=True)
class DenseWeight:
    """A matrix `[n, k]` as it is. With `glu`, its rows are `[gate; up]`, n / 2 each.

    A quantised or mixed one holds its values in float32, and says by `stored` what they come from. So that products with it
    have no rounding but that of the stored weights, activations are not quantised here, which those of
    `pace.ops.native` are."""

    matrix: Tensor
    glu: bool = False
    stored: WeightLayout | MixedLayout | None = None
    order: Tensor | None = None

    @property
    def n(self) -> int:
        return self.matrix.shape[0]

    @property
    def k(self) -> int:
        return self.matrix.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def layout(self) -> AnyLayout:
        return self.stored or self.dtype

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


def weight_nbytes(n: int, k: int, layout: AnyLayout, glu: bool = False) -> int:
    """Bytes of such a weight."""
    return n * k * (layout if isinstance(layout, torch.dtype) else torch.float32).itemsize


def empty_weight(n: int, k: int, layout: AnyLayout, glu: bool = False, order: Tensor | None = None) -> DenseWeight:
    """A weight of zeros, to be filled by `pack_rows_`, or, where it is quantised, by `pack_quantized_`.

    order: that of all its rows (`QuantizedRows`)."""
    if glu and n % 2:
        raise ValueError(f"a gate/up weight has as many gate rows as up rows; got {n} rows in all")
    if order is not None:
        for _, of_part in weight_layout.parts_of(layout, n):
            checks.check_order(order, k, of_part)
    dtype, stored = (layout, None) if isinstance(layout, torch.dtype) else (torch.float32, layout)
    return DenseWeight(torch.zeros(n, k, dtype=dtype), glu, stored, order)


def pack_rows_(weight: DenseWeight, source: Tensor, row: int) -> None:
    """Writes logical rows `row .. row + rows` of `weight` from `source [rows, K]`, rounding to the weight's dtype.

    Disjoint rows may be written from several threads."""
    dtype = checks.check_float_rows(weight, source, row)
    weight.matrix[row : row + source.shape[0]].copy_(source.to(dtype))


def pack_quantized_(weight: DenseWeight, rows: QuantizedRows, row: int) -> None:
    """Writes `rows` as logical rows from `row` on of a quantised weight of their layout and order; ValueError for
    others.

    Disjoint rows may be written from several threads."""
    checks.check_quantized_rows(weight, rows, row)
    weight.matrix[row : row + rows.shape[0]] = rows.dequantize()


def quantize(rows: Tensor, format: Quantizer, name: str = "the matrix") -> QuantizedRows:
    """`rows [R, K]` of any float dtype in a format. Raises ValueError that says `name` where an element is NaN or
    infinite."""
    return format.quantize(rows, name)


def unpack(weight: DenseWeight) -> Tensor:
    """The logical matrix `[N, K]` in `weight.dtype`, which is float32 of a quantised one; columns in the order of the
    input."""
    return weight.matrix


# ---------------------------------------------------------------------------------------------------- linear,
# activations


def embedding(ids: Tensor, weight: DenseWeight) -> Tensor:
    """`[T, K]`: row `ids[t]` of the weight, widened to float32 (float64 stays). Raises ValueError on ids out of
    range."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.n:
        raise ValueError(f"ids must be in 0..{weight.n - 1}; got {int(ids.min())}..{int(ids.max())}")
    return weight.matrix[ids].to(torch.promote_types(weight.dtype, torch.float32))


def linear(
    x: Tensor,
    weight: DenseWeight,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`[T, N]`: `residual + activation(x [T, K] W' + bias [N])`, each part optional."""
    y = functional.linear(x, weight.matrix.to(x.dtype), _like(bias, x))
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else residual + y


def linear_glu(x: Tensor, weight: DenseWeight, activation: str, bias: Tensor | None = None) -> Tensor:
    """`[T, N / 2]`: `activation(x Wg' + bg) * (x Wu' + bu)` where the rows of the weight (and of `bias [N]`) are
    `[gate; up]`."""
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def activation(x: Tensor, name: str) -> Tensor:
    """Elementwise; `name` is one of `ACTIVATIONS`."""
    return ACTIVATIONS[name](x)


def scale_(x: Tensor, factor: float) -> None:
    """Multiplies `x [T, K]` by a number, in place."""
    x.mul_(factor)


def softcap_(x: Tensor, cap: float) -> None:
    """`x [T, K] = cap * tanh(x / cap)`, in place: between -cap and cap."""
    x.copy_(cap * torch.tanh(x / cap))


# ------------------------------------------------------------------------------------------------------------------
# norms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`[T, K]`: `x / sqrt(mean(x^2) + eps) * weight [K]`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`[T, K]`: `(x - mean(x)) / sqrt(var(x) + eps) * weight [K] + bias [K]`, population variance."""
    return functional.layer_norm(x, x.shape[-1:], _like(weight, x), _like(bias, x), eps)


def head_rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """`rms_norm` of every head of `x [T, H, D]` with one `weight [D]`, in place; x may be a strided view."""
    x.copy_(rms_norm(x, weight, eps))


def head_layer_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """`layer_norm` of every head of `x [T, H, D]` with `weight [H, D]`, in place; x may be a strided view."""
    x.copy_(layer_norm(x, None, None, eps) * weight.to(x.dtype))


# --------------------------------------------------------------------------------------------------------------
# attention


def rotary_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotates the first R of the D elements of every head of `x [T, H, D]` in place, with `cos, sin [T, R / 2]`.

    Pair i is elements (i, i + R/2), or (2i, 2i + 1) where interleaved: `(a, b) -> (a cos - b sin, b cos + a sin)`."""
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    a, b = x[..., first], x[..., second]
    rotated_a, rotated_b = a * cos - b * sin, b * cos + a * sin
    x[..., first] = rotated_a
    x[..., second] = rotated_b


def store_kv(k: Tensor, v: Tensor, kv: KVBlocks, slots: Tensor) -> None:
    """Writes `k [T, Hkv, D]` and `v [T, Hkv, Dv]` into position `slot % 16` of block `slot // 16`, rounding to the
    cache's dtype, in int8 with their scales (`ForwardOps.store_kv`)."""
    block_size = kv.k.shape[-1]
    block, offset = slots // block_size, slots % block_size
    if kv.k_scales is not None:
        k, kv.k_scales[block, :, offset] = _scaled_to_127(k)
        v, kv.v_scales[block, :, offset] = _scaled_to_127(v)
    kv.k[block, :, :, offset] = k.to(kv.k.dtype)
    kv.v[block, :, offset, : v.shape[-1]] = v.to(kv.v.dtype)


def _scaled_to_127(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of -127 to 127 in float32 and their scales `[T, Hkv]`. (A subnormal scale is rounded so much that more
    could come.)"""
    x = x.float()
    scales = x.abs().amax(-1) / 127
    scales = scales.where(scales.isfinite(), math.nan)
    return (x / scales[..., None]).where(scales[..., None] > 0, 0.0).round().clamp(-127, 127), scales


def attention(
    q: Tensor, kv: KVBlocks, spans: Spans, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """`[T, Hq * Dv]`: `softmax(scale * q k') v` for every head of `q [T, Hq, D]`, causal within each span's own blocks.

    `ForwardOps.attention` says what groups, window and softcap are, and what is never read."""
    num_tokens, num_heads, _ = q.shape
    out = torch.empty(num_tokens, num_heads, kv.value_dim, dtype=q.dtype)
    starts = spans.query_start.tolist()
    for s, kv_len in enumerate(spans.kv_len.tolist()):
        begin, end = starts[s], starts[s + 1]
        keys, values = _gather(kv, spans.block_table[s], kv_len, q.dtype)
        group = num_heads // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = scale * (q[begin:end].transpose(0, 1) @ keys)  # [Hq, tokens, kv_len]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_position = torch.arange(kv_len - (end - begin), kv_len)[:, None]
        key_position = torch.arange(kv_len)[None]
        hidden = key_position > query_position
        if window is not None:
            hidden |= key_position <= query_position - window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[begin:end] = (weights @ values).transpose(0, 1)
    return out.flatten(1)


def _gather(kv: KVBlocks, block_row: Tensor, kv_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `kv_len` positions of one sequence: keys `[Hkv, D, kv_len]` and values `[Hkv, kv_len, Dv]`."""
    blocks = block_row[: -(-kv_len // kv.k.shape[-1])].long()
    keys, values = kv.k[blocks].to(dtype), kv.v[blocks].to(dtype)
    if kv.k_scales is not None:
        keys, values = keys * kv.k_scales[blocks].unsqueeze(-2), values * kv.v_scales[blocks].unsqueeze(-1)
    keys = keys.permute(1, 2, 0, 3).flatten(2)[..., :kv_len]
    values = values.transpose(0, 1).flatten(1, 2)[:, :kv_len, : kv.value_dim]
    return keys, values


# ---------------------------------------------------------------------------------------------------------------
# sampling


def argmax(logits: Tensor) -> Tensor:
    """int64 `[R]`: where each row of `logits [R, V]` is largest, the lowest index among equals; -1 for a row that holds
    NaN or +inf, or nothing above -inf."""
    return logits.argmax(-1).where(logits.amax(-1).isfinite(), -1)


def softmax(logits: Tensor) -> Tensor:
    """`[R, V]`, over the last dimension."""
    return logits.softmax(-1)


def log_softmax(logits: Tensor) -> Tensor:
    """`[R, V]`, over the last dimension."""
    return logits.log_softmax(-1)


def top_k_top_p_(logits: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Sets to -inf in `logits [R, V]` all but the `top_k[r]` largest, then all but the nucleus of mass `top_p[r]` among
    those.

    `k = 0` and `p >= 1` are off. Values equal to the k-th largest stay. The nucleus is the words, by falling logit and
    then by rising index, before which less than p of the probability lies; the first is always in it."""
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
    """Sets to -inf in `logits [R, V]` what a mask does not allow. `mask` int32 `[M, ceil(V / 32)]`: bit `i % 32` of word
    `i // 32` is set where token i is allowed; bits beyond V mean nothing. Mask m is for row `rows[m]` (no row twice), or
    for row m where no rows are given."""
    allowed = (mask[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
    banned = allowed.flatten(1)[:, : logits.shape[1]] == 0
    rows = torch.arange(logits.shape[0]) if rows is None else rows
    logits[rows] = logits[rows].masked_fill(banned, -math.inf)


def sample(logits: Tensor, draws: Draws) -> Drawn:
    """A token for each of `draws`, -1 where its row holds NaN or +inf, or nothing above -inf; and log-probabilities where
    wanted, of the row as its mask leaves it.

    What a mask bans is -inf. With `y = x / temperature` and the weight `exp(y - max(y))`, after the edits
    of x: top_k and top_p as `top_k_top_p_`; weights below min_p go; of the others stay those whose `|log w - E[log w]|` is smallest, until they
    have typical_p of the mass, with what equals the last. The token is the first at which the cumulative weight, in
    rising order of the ids, exceeds `uniform` of the whole."""
    count = len(draws.rows)
    num_top = torch.full((count,), -1) if draws.num_top is None else draws.num_top
    most_top = max([0, *num_top.tolist()])
    tokens = torch.full((count,), -1, dtype=torch.int64)
    values = torch.full((0 if draws.num_top is None else count,), -math.inf)
    top, top_values = torch.full((len(values), most_top), -1), torch.full((len(values), most_top), -math.inf)
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
    largest = int(argmax(x[None])[0])
    if largest < 0 or not draws.temperature[index]:
        return largest
    y = (x / draws.temperature[index])[None]
    top_k_top_p_(y, draws.top_k[index : index + 1], draws.top_p[index : index + 1])
    log_weights = (y[0] - y.max()).double()
    log_weights[log_weights.exp() < float(draws.min_p[index])] = -math.inf
    if draws.typical_p[index] < 1:
        _keep_typical_(log_weights, float(draws.typical_p[index]))
    cumulative = log_weights.exp().cumsum(0)
    place = torch.searchsorted(cumulative, float(draws.uniform[index]) * cumulative[-1], right=True)
    return min(int(place), int(log_weights.exp().nonzero()[-1]))


def _keep_typical_(log_weights: Tensor, mass: float) -> None:
    probability = log_weights.softmax(0)
    level = (probability * log_weights).nansum()
    distance, order = (log_weights - level).abs().sort(stable=True)
    last = min(int((probability[order].cumsum(0) < mass).sum()), len(order) - 1)
    outside = distance > distance[last]
    outside[0] = False
    log_weights[order[outside]] = -math.inf


def token_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens [M]` under rows `rows [M]`, float32 `[M]`; the `num_top` most likely tokens, int64 `[M,
    num_top]`, largest first and the lower id first among equals; and theirs. -1 and -inf beyond V."""
    logprobs = log_softmax(logits[rows])
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    missing = max(0, num_top - logits.shape[1])
    top = torch.nn.functional.pad(order[:, :num_top], (0, missing), value=-1)
    values = torch.nn.functional.pad(ordered[:, :num_top], (0, missing), value=-math.inf)
    return logprobs.gather(1, tokens[:, None])[:, 0], top, values


def _like(vector: Tensor | None, x: Tensor) -> Tensor | None:
    return None if vector is None else vector.to(x.dtype)
