"""What a model costs, from its config alone: bytes of weights and cache, bytes and operations of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pace.llm.layers import Embedding, Layer, Linear
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.ops import native


@dataclass(frozen=True)
class Costs:
    """Of one model with weights and cache in one dtype. All in bytes, or in operations (a multiply-add is two)."""

    weight_bytes: int
    """Resident, as the kernels store them."""
    decode_weight_bytes: int
    """That a step reads, whatever the number of its tokens: all but an embedding of its own, of which it reads single rows."""
    kv_bytes_per_token: int
    layer_flops_per_token: int
    """Of the matrices of the layers."""
    head_flops: int
    """Of the LM head, for one row of logits."""
    attention_flops_per_pair: int
    """Over all layers, for one token that sees one position."""

    @classmethod
    def of(cls, model: BaseModelForCausalLM, dtype: torch.dtype) -> Costs:
        """`model` need not be loaded. Sliding windows are not taken into account: the costs are those of full attention."""
        matrices = [part for part in _walk(model) if isinstance(part, Linear)]
        gathered = [part for part in matrices if isinstance(part, Embedding)]
        head = model.lm_head
        tied = getattr(head, "embedding", None)
        weight_bytes = model.planned_nbytes(native, dtype)
        head_matrix = tied or head
        layer_flops = sum(2 * sum(part.parts.values()) * part.k for part in matrices if part is not head and part not in gathered)
        config, spec = model.config, model.kv_spec
        return cls(
            weight_bytes=weight_bytes,
            decode_weight_bytes=weight_bytes - sum(part.planned_nbytes(native, dtype) for part in gathered if part is not tied),
            kv_bytes_per_token=_dtype_scaled(spec.position_bytes, spec.dtype, dtype),
            layer_flops_per_token=layer_flops,
            head_flops=2 * sum(head_matrix.parts.values()) * head_matrix.k,
            attention_flops_per_pair=4 * config.num_attention_heads * spec.head_dim * spec.num_layers,
        )

    def decode_bytes(self, batch: int, context: int) -> int:
        """Read by a step in which `batch` sequences of `context` tokens each get one more."""
        return self.decode_weight_bytes + batch * context * self.kv_bytes_per_token

    def prefill_flops(self, tokens: int) -> int:
        """Of one sequence from its start; the head runs on the last row."""
        pairs = tokens * (tokens + 1) // 2
        return tokens * self.layer_flops_per_token + pairs * self.attention_flops_per_pair + self.head_flops


def _walk(layer: Layer) -> Iterator[Layer]:
    yield layer
    for child in layer.children():
        yield from _walk(child)


def _dtype_scaled(num_bytes: int, of: torch.dtype, to: torch.dtype) -> int:
    return num_bytes * to.itemsize // of.itemsize
