"""Self-attention over the block cache: fused QKV, norm and rotation of the heads, cache write, attention, output.
`SharedAttention` sees the keys and values of another layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pace.batch import ForwardBatch, KVBlocks, LayerCache, Positions, Shares
from pace.llm.layers.base import Layer, Vectors
from pace.llm.layers.linear import Linear
from pace.llm.layers.norm import HeadNorm, HeadUnitNorm, NoHeadNorm
from pace.llm.layers.rotary import Angles, NoRotary, Rotary, Temperature
from pace.ops.experts import Clamp
from pace.ops.protocol import AttentionOptions, ForwardOps


class Attention(Layer):
    """Self-attention: `residual + output(softmax(cap(scale * q k')) v)`, causal within each span, limited by the window
    of `cache`.

    The rows of `qkv` are `num_heads` query heads of `cache.key_dim` elements, then `cache.kv_heads` key heads of the
    same width. After them come `cache.kv_heads` value heads of `cache.value_dim` elements, unless keys are values. With
    a gate, the last rows are the gate of each channel of the context, or of each head."""

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        num_heads: int,
        cache: Positions,
        rotary: Rotary | NoRotary,
        query_norm: HeadNorm | NoHeadNorm | None = None,
        key_norm: HeadNorm | NoHeadNorm | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        norm_last: bool = False,
        sinks: Vectors | None = None,
        temperature: Temperature | None = None,
        gate: str | None = None,
        clip: float | None = None,
        clips_normalised: bool = False,
        slopes: Tensor | None = None,
        bf16_bias: bool = False,
        value_norm: HeadUnitNorm | NoHeadNorm | None = None,
        keys_are_values: bool = False,
        biases: Callable[[], Tensor] | None = None,
    ):
        """`scale`: factor of the scores, by default `cache.key_dim ** -0.5`. `softcap`: scores become
        `softcap * tanh(score / softcap)`. `norm_last`: heads are rotated before they are normalised. `sinks`: one more
        score per head, without a value. `temperature`: multiplies queries. `gate`: activation of the gate that
        multiplies the context, as in `ForwardOps.gate_`. `clip`: limits queries, keys and values to `-clip .. clip`
        before any other step, or with `clips_normalised` after the norms. `slopes`, `bf16_bias`: as in
        `AttentionOptions`. `keys_are_values`: values are the keys before their norm and rotation. `biases`: returns
        those of `AttentionOptions`, from the loaded weights of another layer."""
        self.qkv = qkv
        self.output = output
        self.num_heads = num_heads
        self.cache: LayerCache = cache
        self.rotary = rotary
        self.query_norm = query_norm or NoHeadNorm()
        self.key_norm = key_norm or NoHeadNorm()
        self.scale = cache.key_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.sinks = sinks or Vectors({})
        self.norm_last = norm_last
        self.temperature = temperature or NoRotary()
        self.gate = gate
        self.clip = None if clip is None else Clamp(-clip, clip)
        self.clips_normalised = clips_normalised
        self.slopes = slopes
        self.bf16_bias = bf16_bias
        self.value_norm = value_norm or NoHeadNorm()
        self.keys_are_values = keys_are_values
        self.biases = biases
        self.causal = False
        """True if the rows of an image do not see each other, in a model in which they do in other layers."""

    def add_gate(self, name: str, num_rows: int, activation: str) -> None:
        """Adds a gate, whose tensor `name` has a row for each channel or for each head, and no bias. Before
        `allocate`."""
        self.qkv = self.qkv.with_part(name, num_rows)
        self.gate = activation

    @property
    def readers(self) -> list[Linear]:
        return [self.qkv]

    @property
    def positions(self) -> Positions:
        """The keys and values that it sees."""
        assert isinstance(self.cache, Positions)
        return self.cache

    @property
    def makes_plain_values(self) -> bool:
        """True if values are rows of its product as they are."""
        return isinstance(self.value_norm, NoHeadNorm) and not self.keys_are_values and self.clip is None

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        angles: Angles,
        batch: ForwardBatch,
        kv: KVBlocks,
        residual: Tensor | None = None,
    ) -> Tensor:
        qkv = self.qkv(ops, x, None if self.clips_normalised else self.clip)
        q, k, v, gate = self._heads(qkv)
        self.value_norm(ops, v)
        if not self.norm_last:
            self._normalise(ops, q, k)
        if self.clip and self.clips_normalised:
            q, k, v, gate = self._heads(ops.activation(qkv, self.clip))
        self.rotary.rotate_(ops, q, angles)
        self.rotary.rotate_(ops, k, angles)
        if self.norm_last:
            self._normalise(ops, q, k)
        self.temperature.rotate_(ops, q, angles)
        ops.store_kv(k, v, kv, batch.slots)
        context = self._attend(ops, q, batch, kv)
        if self.gate is not None:
            ops.gate_(context, gate, self.gate)
        return self.output(ops, context, residual=residual)

    def _attend(self, ops: ForwardOps, q: Tensor, batch: ForwardBatch, kv: KVBlocks) -> Tensor:
        seen = self.positions
        options = AttentionOptions(
            self.scale,
            seen.window,
            self.softcap,
            self.sinks.values,
            seen.chunked,
            self.causal,
            self.slopes,
            self.bf16_bias,
            biases=self.biases and self.biases(),
        )
        return ops.attention(q, kv, batch.spans, options)

    def _normalise(self, ops: ForwardOps, q: Tensor, k: Tensor) -> None:
        self.query_norm(ops, q)
        self.key_norm(ops, k)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns views into the columns of `qkv`: three `[T, H, D]`, and the gate `[T, G]`."""
        cache, keys = self.positions, self.num_heads * self.positions.key_dim
        values = keys + cache.kv_heads * cache.key_dim
        gates = values + (0 if self.keys_are_values else cache.kv_heads * cache.value_dim)
        q = qkv[:, :keys].unflatten(1, (self.num_heads, cache.key_dim))
        k = qkv[:, keys:values].unflatten(1, (cache.kv_heads, cache.key_dim))
        if self.keys_are_values:
            return q, k, k.clone(), qkv[:, gates:]
        return q, k, qkv[:, values:gates].unflatten(1, (cache.kv_heads, cache.value_dim)), qkv[:, gates:]


class SharedAttention(Attention):
    """Attention of its own queries to keys and values that another layer has stored, at positions of the form
    `positions`. The rows of `query` are its heads."""

    def __init__(
        self,
        query: Linear,
        output: Linear,
        num_heads: int,
        positions: Positions,
        shares: Shares | Positions,
        rotary: Rotary | NoRotary,
        query_norm: HeadNorm | NoHeadNorm | None = None,
        scale: float | None = None,
    ):
        """`shares`: the layer with these keys and values; `positions` if it is a layer of another model. `scale`: as in
        `Attention`."""
        super().__init__(query, output, num_heads, positions, rotary, query_norm, scale=scale)
        self.cache = shares
        self._seen = positions

    @property
    def positions(self) -> Positions:
        return self._seen

    @property
    def makes_plain_values(self) -> bool:
        return False

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        angles: Angles,
        batch: ForwardBatch,
        kv: KVBlocks,
        residual: Tensor | None = None,
    ) -> Tensor:
        q = self.qkv(ops, x).unflatten(1, (self.num_heads, self.positions.key_dim))
        self.query_norm(ops, q)
        self.rotary.rotate_(ops, q, angles)
        return self.output(ops, self._attend(ops, q, batch, kv), residual=residual)


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> Tensor:
    """Returns the slopes of ALiBi, float32 `[num_heads]`: `2^(-max_bias i / p)` for i in 1 to p, the next power of two.
    With fewer heads than p, the even i come first, then the first odd ones."""
    power = 1 << (num_heads - 1).bit_length()
    numbers = torch.arange(1, power + 1, dtype=torch.float64)
    if power != num_heads:
        numbers = torch.cat([numbers[1::2], numbers[::2]])[:num_heads]
    return torch.exp2(-max_bias / power * numbers).float()
