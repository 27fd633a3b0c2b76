"""All operations in plain torch: the specification of `pace.ops.native`, and a backend that separates bugs of models
from bugs of kernels. `pace.ops.protocol` has the contracts.

Activations are float32, or float64 if the weights are. Weights of any float dtype are widened to the activations' dtype
first, so that only the stored weights are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from pace.ops import checks, weight_layout
from pace.ops.adapters import AdapterTable
from pace.ops.blocks import BlockRows
from pace.ops.experts import Activation, Clamp, ClampedSwiglu
from pace.ops.file_table import RowTable
from pace.ops.protocol import AttentionOptions, ExpertOptions
from pace.ops.quantizer import Quantizer
from pace.ops.reference_parts import adapters as reference_adapters
from pace.ops.reference_parts import experts as reference_experts
from pace.ops.reference_parts.experts import route  # noqa: F401
from pace.ops.reference_parts.sampling import (  # noqa: F401
    apply_mask_,
    argmax,
    sample,
    token_logprobs,
)
from pace.ops.reference_parts.states import causal_conv, gate_, gated_norm, recurrence  # noqa: F401
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
    "relu2": lambda x: functional.relu(x).square(),
    "tanh": torch.tanh,
}

POOLED = {
    "cls": lambda rows: rows[0],
    "max": lambda rows: rows.amax(0),
    "mean": lambda rows: rows.sum(0) / len(rows),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(0) / math.sqrt(len(rows)),
    "weightedmean": lambda rows: _counts(rows) @ rows / _counts(rows).sum(),
    "lasttoken": lambda rows: rows[-1],
}
"""Pooling -> the row of a text, from its rows `[n, K]`."""


def _counts(rows: Tensor) -> Tensor:
    return torch.arange(1, len(rows) + 1, dtype=rows.dtype)


# ----------------------------------------------------------------------------------------------------------------
# weights


@dataclass(frozen=True)
class DenseWeight:
    """A matrix `[n, k]` in plain form. With `glu`, its rows are `[gate; up]`, n / 2 each.

    A quantised or mixed weight holds its values in float32; `stored` is its original layout. Activations are not
    quantised here, unlike in `pace.ops.native`, so that only the stored weights are rounded. The exception are layouts
    with `token_inputs`."""

    matrix: Tensor
    glu: bool = False
    stored: WeightLayout | MixedLayout | None = None
    order: Tensor | None = None
    row_scales: Tensor | None = None
    """float32 `[n]`: scales of the rows with `token_inputs`."""

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
    return n * k * (layout if isinstance(layout, torch.dtype) else torch.float32).itemsize


def empty_weight(n: int, k: int, layout: AnyLayout, glu: bool = False, order: Tensor | None = None) -> DenseWeight:
    if glu and n % 2:
        raise ValueError(f"a gate/up weight has as many gate rows as up rows; got {n} rows in all")
    if order is not None:
        for _, of_part in weight_layout.parts_of(layout, n):
            checks.check_order(order, k, of_part)
    dtype, stored = (layout, None) if isinstance(layout, torch.dtype) else (torch.float32, layout)
    scales = (
        torch.ones(n) if stored and any(_takes_tokens(part) for _, part in weight_layout.parts_of(stored, n)) else None
    )
    return DenseWeight(torch.zeros(n, k, dtype=dtype), glu, stored, order, scales)


def _takes_tokens(layout: torch.dtype | WeightLayout) -> bool:
    return isinstance(layout, WeightLayout) and layout.token_inputs


def pack_matrices(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[DenseWeight]:
    return [DenseWeight(matrix.to(dtype)) for matrix in matrices]


def pack_rows_(weight: DenseWeight, source: Tensor, row: int) -> None:
    dtype = checks.check_float_rows(weight, source, row)
    weight.matrix[row : row + source.shape[0]].copy_(source.to(dtype))


def pack_quantized_(weight: DenseWeight, rows: QuantizedRows | BlockRows, row: int) -> None:
    checks.check_quantized_rows(weight, rows, row)
    weight.matrix[row : row + rows.shape[0]] = rows.dequantize()
    if rows.layout.token_inputs:
        weight.row_scales[row : row + rows.shape[0]] = rows.scales[:, 0]


def quantize(rows: Tensor, format: Quantizer, name: str = "the matrix") -> QuantizedRows:
    return format.quantize(rows, name)


def unpack(weight: DenseWeight) -> Tensor:
    return weight.matrix


# ----------------------------------------------------------------------------------------------------------------
# linear, activations


def embedding(ids: Tensor, weight: DenseWeight | RowTable) -> Tensor:
    if isinstance(weight, RowTable):
        return weight.rows(ids)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.n:
        raise ValueError(f"ids must be in 0..{weight.n - 1}; got {int(ids.min())}..{int(ids.max())}")
    return weight.matrix[ids].to(torch.promote_types(weight.dtype, torch.float32))


def given_rows(rows: Tensor) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


def place_rows_(x: Tensor, rows: Tensor, at: Tensor, add: bool) -> None:
    x[at] = x[at] + rows if add else rows.to(x.dtype)


def concatenate(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b.to(a.dtype)], 1)


def pool(x: Tensor, starts: Tensor, pooling: str) -> Tensor:
    of_rows, edges = POOLED[checks.check_pooling(pooling)], starts.tolist()
    out = x.new_empty(len(edges) - 1, x.shape[1])
    for text, (start, end) in enumerate(zip(edges, edges[1:])):
        out[text] = of_rows(x[start:end])
    return out


def linear(
    x: Tensor,
    weight: DenseWeight,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    if weight.row_scales is None:
        y = functional.linear(x, weight.matrix.to(x.dtype), _like(bias, x))
    else:
        y = _linear_of_tokens(x, weight)
        y = y if bias is None else y + bias.to(x.dtype)
    if activation is not None:
        y = _activate(y, activation)
    return y if residual is None else residual + y


def _linear_of_tokens(x: Tensor, weight: DenseWeight) -> Tensor:
    """The product of a weight that has rows with `token_inputs`. Their sums are whole numbers and exact."""
    factor = 1 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5) * 127
    codes, row, found = (x * factor).round(), 0, []
    for rows, layout in weight_layout.parts_of(weight.layout, weight.n):
        matrix = weight.matrix[row : row + rows].to(x.dtype)
        if _takes_tokens(layout):
            scales = weight.row_scales[row : row + rows].to(x.dtype)
            levels = matrix / torch.where(scales == 0, 1, scales)[:, None]
            found.append(functional.linear(codes, levels) * (scales * (1 / factor)))
        else:
            found.append(functional.linear(x, matrix))
        row += rows
    return torch.cat(found, -1)


def linear_glu(x: Tensor, weight: DenseWeight, activation: str | ClampedSwiglu, bias: Tensor | None = None) -> Tensor:
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    return _gated(gate, up, activation)


def activation(x: Tensor, activation: Activation) -> Tensor:
    return _activate(x, activation)


def glu(x: Tensor, activation: str) -> Tensor:
    return _gated(*x.chunk(2, dim=-1), activation)


def add_adapters_(y: Tensor, x: Tensor, adapters: AdapterTable, routing: Tensor) -> None:
    reference_adapters.add_adapters(linear, y, x, adapters, routing)


def scale_(x: Tensor, factor: float | Tensor) -> None:
    x.mul_(factor.to(x.dtype) if isinstance(factor, Tensor) else factor)


def softcap_(x: Tensor, cap: float) -> None:
    x.copy_(cap * torch.tanh(x / cap))


# ------------------------------------------------------------------------------------------------------------------
# norms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], _like(weight, x), _like(bias, x), eps)


def head_rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    x.copy_(rms_norm(x, weight, eps))


def head_layer_norm_(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    y = layer_norm(x, None, None, eps) * weight.to(x.dtype)
    x.copy_(y if bias is None else y + bias.to(x.dtype))


# --------------------------------------------------------------------------------------------------------------
# attention


def rotary_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
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
    block_size = kv.k.shape[-1]
    block, offset = slots // block_size, slots % block_size
    if kv.k_scales is not None:
        k, kv.k_scales[block, :, offset] = _scaled_to_127(k)
        v, kv.v_scales[block, :, offset] = _scaled_to_127(v)
    kv.k[block, :, :, offset] = k.to(kv.k.dtype)
    kv.v[block, :, offset, : v.shape[-1]] = v.to(kv.v.dtype)


def _scaled_to_127(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns integers of -127 to 127 in float32, and their scales `[T, Hkv]`. The clamp is for subnormal scales, whose
    rounding error could otherwise give larger values."""
    x = x.float()
    scales = x.abs().amax(-1) / 127
    scales = scales.where(scales.isfinite(), math.nan)
    return (x / scales[..., None]).where(scales[..., None] > 0, 0.0).round().clamp(-127, 127), scales


def attention(
    q: Tensor, kv: KVBlocks, spans: Spans, options: AttentionOptions, latent_q: Tensor | None = None
) -> Tensor:
    window, softcap = options.window, options.softcap
    num_tokens, num_heads, _ = q.shape
    out = torch.empty(num_tokens, num_heads, kv.value_dim, dtype=q.dtype)
    starts = spans.query_start.tolist()
    for s, kv_len in enumerate(spans.kv_len.tolist()):
        begin, end = starts[s], starts[s + 1]
        newest, oldest = (
            None if options.causal or each is None else each[begin:end, None] for each in (spans.newest, spans.oldest)
        )
        first = 0 if window is None else max(0, kv_len - (end - begin) - window + 1)
        if oldest is not None and end > begin:
            first = min(first, int(oldest.min()))
        first_block = first // kv.k.shape[-1]
        keys, values = _gather(kv, spans.block_table[s], first_block, kv_len, q.dtype)
        query_position = torch.arange(kv_len - (end - begin), kv_len)[:, None]
        key_position = torch.arange(kv_len - keys.shape[2], kv_len)[None]
        group = num_heads // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = options.scale * (q[begin:end].transpose(0, 1) @ keys)  # [Hq, tokens, N]
        if latent_q is not None:
            scores += options.scale * (latent_q[begin:end].transpose(0, 1) @ values.transpose(1, 2))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if options.slopes is not None:
            slopes = options.slopes.to(q.dtype)[:, None, None]
            if options.bf16_bias:
                scores += options.scale * (slopes * key_position.bfloat16()).bfloat16().to(q.dtype)
            else:
                scores += slopes * (key_position - query_position)
        if options.biases is not None:
            radius = options.biases.shape[1] // 2
            distances = (key_position - query_position).clamp(-radius, radius)
            scores += options.biases.to(q.dtype)[:, radius + distances]
        hidden = key_position > (query_position if newest is None else newest)
        if window is not None:
            begins = query_position // window * window if options.chunked else query_position - window + 1
            hidden |= key_position < (begins if oldest is None else begins.minimum(oldest))
        scores = scores.masked_fill(hidden, -math.inf)
        if options.sinks is not None:
            sinks = options.sinks.to(q.dtype)[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : keys.shape[2]]
        out[begin:end] = (weights @ values).transpose(0, 1)
    return out.flatten(1)


def _gather(
    kv: KVBlocks, block_row: Tensor, first_block: int, kv_len: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gathers N positions of one sequence, from the start of block `first_block` to `kv_len - 1`: keys `[Hkv, D, N]`
    and values `[Hkv, N, Dv]`."""
    block_size = kv.k.shape[-1]
    blocks = block_row[first_block : -(-kv_len // block_size)].long()
    count = kv_len - first_block * block_size
    keys, values = kv.k[blocks].to(dtype), kv.v[blocks].to(dtype)
    if kv.k_scales is not None:
        keys, values = keys * kv.k_scales[blocks].unsqueeze(-2), values * kv.v_scales[blocks].unsqueeze(-1)
    keys = keys.permute(1, 2, 0, 3).flatten(2)[..., :count]
    values = values.transpose(0, 1).flatten(1, 2)[:, :count, : kv.value_dim]
    return keys, values


# --------------------------------------------------------------------------------------------------------------
# mixtures of experts


@dataclass(frozen=True)
class DenseStack:
    """One matrix for each expert."""

    experts: list[DenseWeight]

    def __len__(self) -> int:
        return len(self.experts)

    @property
    def n(self) -> int:
        return self.experts[0].n

    @property
    def k(self) -> int:
        return self.experts[0].k

    @property
    def layout(self) -> AnyLayout:
        return self.experts[0].layout

    @property
    def glu(self) -> bool:
        return self.experts[0].glu

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)


def stack_nbytes(count: int, n: int, k: int, layout: AnyLayout, glu: bool = False) -> int:
    return count * weight_nbytes(n, k, layout, glu)


def empty_stack(count: int, n: int, k: int, layout: AnyLayout, glu: bool = False) -> DenseStack:
    return DenseStack([empty_weight(n, k, layout, glu) for _ in range(count)])


def experts(
    x: Tensor,
    gate_up: DenseStack,
    down: DenseStack,
    routing: Tensor,
    options: ExpertOptions,
    residual: Tensor | None = None,
) -> Tensor:
    return reference_experts.sum_of_experts(linear, linear_glu, x, gate_up, down, routing, options, residual)


def heads_linear(x: Tensor, weights: DenseStack) -> Tensor:
    return torch.cat([linear(x[:, h], weight) for h, weight in enumerate(weights.experts)], -1)


def _activate(x: Tensor, f: Activation) -> Tensor:
    if isinstance(f, str):
        return ACTIVATIONS[f](x)
    if isinstance(f, Clamp):
        return x.clamp(f.low, f.high)
    positive, negative = f.alpha_p * x * x, f.alpha_n * (torch.expm1(x.clamp(max=f.eps)) - x)
    return torch.where(x > 0, positive, negative) + f.beta * x


def _gated(gate: Tensor, up: Tensor, activation: str | ClampedSwiglu) -> Tensor:
    if isinstance(activation, str):
        return ACTIVATIONS[activation](gate) * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)


def _like(vector: Tensor | None, x: Tensor) -> Tensor | None:
    return None if vector is None else vector.to(x.dtype)
