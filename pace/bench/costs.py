"""What a model costs, from its config alone: bytes of weights and cache, bytes and operations of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from pace.llm.layers import Attention, Embedding, Layer, Linear
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.ops import native


@dataclass(frozen=True)
class Costs:
    """Of one model with weights in one dtype, or quantised as they are planned, and keys and values in another. All in
    bytes, or in operations (a multiply-add is two)."""

    weight_bytes: int
    """Resident, as the kernels store them."""
    decode_weight_bytes: int
    """That a step reads, whatever the number of its tokens: all but an embedding of its own, of which it reads single
    rows."""
    head_bytes: int
    """Of `decode_weight_bytes`, those of the LM head's matrix."""
    kv_bytes_per_token: int
    """Over all layers."""
    layer_flops_per_token: int
    """Of the matrices of the layers."""
    head_flops: int
    """Of the LM head, for one row of logits."""
    attention_flops_per_pair: int
    """Over all layers, for one token that sees one position."""
    windows: tuple[int | None, ...]
    """Of each layer: how many positions back a token sees; None for all."""
    code: str | None
    """In which most of the weights that a step reads are stored (a name of `pace.ops.weight_layout.CODES`); None for
    floats."""

    @classmethod
    def of(cls, model: BaseModelForCausalLM, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Costs:
        """`model` need not be loaded. `kv_dtype` of keys and values; None for `dtype`."""
        parts = list(_walk(model))
        matrices = [part for part in parts if isinstance(part, Linear)]
        gathered = [part for part in matrices if isinstance(part, Embedding)]
        head = model.lm_head
        tied = getattr(head, "embedding", None)
        weight_bytes = model.planned_nbytes(native, dtype)
        head_matrix = tied or head
        layer_flops = sum(
            2 * sum(part.parts.values()) * part.k for part in matrices if part is not head and part not in gathered
        )
        read: Counter[str | None] = Counter()
        for part in matrices:
            if part not in gathered or part is tied:
                read[part.plan.layout and part.plan.layout.code] += part.planned_nbytes(native, dtype)
        config, spec = model.config, model.kv_spec
        return cls(
            weight_bytes=weight_bytes,
            decode_weight_bytes=weight_bytes
            - sum(part.planned_nbytes(native, dtype) for part in gathered if part is not tied),
            head_bytes=head_matrix.planned_nbytes(native, dtype),
            kv_bytes_per_token=replace(spec, dtype=kv_dtype or dtype).position_bytes,
            layer_flops_per_token=layer_flops,
            head_flops=2 * sum(head_matrix.parts.values()) * head_matrix.k,
            attention_flops_per_pair=4 * config.num_attention_heads * spec.head_dim * spec.num_layers,
            windows=tuple(part.window for part in parts if isinstance(part, Attention)),
            code=read.most_common(1)[0][0],
        )

    def decode_bytes(self, batch: int, context: int) -> int:
        """Read by a step in which `batch` sequences of `context` tokens each get one more."""
        return self.decode_weight_bytes + batch * self.kv_bytes(context)

    def decode_flops(self, batch: int, context: int) -> int:
        """Of the same step."""
        return batch * (self.layer_flops_per_token + self.head_flops + self.decode_attention_flops(context))

    def prefill_flops(self, tokens: int) -> int:
        """Of one sequence from its start; the head runs on the last row."""
        return tokens * self.layer_flops_per_token + self.prefill_attention_flops(tokens) + self.head_flops

    def kv_bytes(self, context: int) -> int:
        """Of the keys and values that one more token of a sequence of `context` tokens sees."""
        return self.kv_bytes_per_token * sum(_visible(context, window) for window in self.windows) // len(self.windows)

    def decode_attention_flops(self, context: int) -> int:
        """Of one more token of a sequence of `context` tokens."""
        return (
            self.attention_flops_per_pair
            * sum(_visible(context, window) for window in self.windows)
            // len(self.windows)
        )

    def prefill_attention_flops(self, tokens: int) -> int:
        """Of one sequence from its start."""
        return (
            self.attention_flops_per_pair * sum(_pairs(tokens, window) for window in self.windows) // len(self.windows)
        )


def _visible(context: int, window: int | None) -> int:
    return min(context, window or context)


def _pairs(tokens: int, window: int | None) -> int:
    """Of a token and a position that it sees, itself included."""
    first = _visible(tokens, window)
    return first * (first + 1) // 2 + (tokens - first) * first


def _walk(layer: Layer) -> Iterator[Layer]:
    yield layer
    for child in layer.children():
        yield from _walk(child)
