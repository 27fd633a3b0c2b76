"""Self-attention over the block cache: fused QKV, norm and rotation of the heads, cache write, attention, output."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from pace.batch import ForwardBatch, KVBlocks
from pace.llm.layers.base import Layer
from pace.llm.layers.linear import Linear
from pace.llm.layers.norm import HeadNorm, NoHeadNorm
from pace.llm.layers.rotary import Angles, NoRotary, Rotary


class Attention(Layer):
    """`residual + output(softmax(q k' / sqrt(D)) v)`, causal within each span, `window` positions back (None: all).

    The rows of `qkv` are those of `num_heads` query heads, then `num_kv_heads` key heads, then as many value heads, of
    `head_dim` each."""

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Rotary | NoRotary,
        window: int | None = None,
        query_norm: HeadNorm | NoHeadNorm | None = None,
        key_norm: HeadNorm | NoHeadNorm | None = None,
    ):
        self.qkv = qkv
        self.output = output
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rotary = rotary
        self.window = window
        self.query_norm = query_norm or NoHeadNorm()
        self.key_norm = key_norm or NoHeadNorm()

    def __call__(
        self, ops: ModuleType, x: Tensor, angles: Angles, batch: ForwardBatch, kv: KVBlocks, residual: Tensor
    ) -> Tensor:
        q, k, v = self._heads(self.qkv(ops, x))
        self.query_norm(ops, q)
        self.key_norm(ops, k)
        self.rotary.rotate_(ops, q, angles)
        self.rotary.rotate_(ops, k, angles)
        ops.store_kv(k, v, kv, batch.slots)
        context = ops.attention(q, kv, batch.spans, self.head_dim**-0.5, self.window)
        return self.output(ops, context, residual=residual)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views `[T, H, D]` into the columns of `qkv`."""
        heads = qkv.unflatten(1, (self.num_heads + 2 * self.num_kv_heads, self.head_dim))
        keys, values = self.num_heads, self.num_heads + self.num_kv_heads
        return heads[:, :keys], heads[:, keys:values], heads[:, values:]
