"""What a model costs, from its config alone: bytes of weights and cache, bytes and operations of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pace.batch import BLOCK_SIZE, KVSpec
from pace.llm.cache.groups import by_lifetime, most_kept
from pace.llm.cache.manager import STEP_TOKENS
from pace.llm.layers import Attention, Embedding, LatentAttention, Layer, Linear, MixtureOfExperts
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.ops import native


class AttentionCosts(NamedTuple):
    """Of one layer."""

    kv_bytes: int
    """Of the key and the value of one position."""
    flops_per_pair: int
    """Operations for one token that sees one position."""
    window: int | None
    """How many positions back a token sees; None for all."""
    chunked: bool = False
    """Whether it sees those of its chunk of `window` positions."""

    def visible(self, context: int) -> int:
        """Positions that the last of `context` tokens sees."""
        if self.chunked:
            return context and (context - 1) % self.window + 1
        return min(context, self.window or context)

    def pairs(self, tokens: int) -> int:
        """Of a token of `tokens` and a position that it sees, itself included."""
        if self.chunked:
            whole, rest = divmod(tokens, self.window)
            return whole * self.window * (self.window + 1) // 2 + rest * (rest + 1) // 2
        first = self.visible(tokens)
        return first * (first + 1) // 2 + (tokens - first) * first


class ExpertCosts(NamedTuple):
    """Of the experts of one layer."""

    count: int
    chosen: int
    """By each token."""
    bytes_each: int
    flops_each: int
    """Of one token."""
    mappable_each: int
    """Of the bytes, those that may stay in a file (`weights="mapped"`)."""

    def read_bytes(self, tokens: int) -> int:
        """That a step of so many tokens reads, each of which chooses as if by lot."""
        return round(self.bytes_each * self.count * self.share_chosen(tokens))

    def share_chosen(self, tokens: int) -> float:
        """Of the experts, by a step of so many tokens."""
        return 1 - (1 - self.chosen / self.count) ** tokens


@dataclass(frozen=True)
class Costs:
    """Of one model with weights in one dtype, or quantised as they are planned, and keys and values in another. All in
    bytes, or in operations (a multiply-add is two)."""

    weight_bytes: int
    """Resident, as the kernels store them."""
    dense_weight_bytes: int
    """That every step reads: all but experts, and an embedding of its own, of which single rows are read."""
    head_bytes: int
    """Of `decode_weight_bytes`, those of the LM head's matrix."""
    layer_flops_per_token: int
    """Of the matrices of the layers; of experts, those that a token chooses."""
    head_flops: int
    """Of the LM head, for one row of logits."""
    attention: tuple[AttentionCosts, ...]
    """Of each layer that attends."""
    cache: KVSpec
    """How their keys and values are kept."""
    experts: tuple[ExpertCosts, ...]
    """Of each layer that has some."""
    code: str | None
    """In which most of the weights that a step reads are stored (a name of `pace.ops.weight_layout.CODES`); None for
    floats."""
    layer_code: str | None
    """In which most of what the layers multiply by is stored."""
    head_code: str | None
    """In which most of the LM head is."""

    @classmethod
    def of(cls, model: BaseModelForCausalLM, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Costs:
        """`model` need not be loaded. `kv_dtype` of keys and values; None for `dtype`."""
        parts = list(_walk(model))
        mixtures = [part for part in parts if isinstance(part, MixtureOfExperts)]
        experts = tuple(_expert_costs(mixture, dtype) for mixture in mixtures)
        of_experts = {id(expert) for mixture in mixtures for expert in _experts(mixture)}
        matrices = [part for part in parts if isinstance(part, Linear)]
        gathered = [part for part in matrices if isinstance(part, Embedding)]
        head = model.lm_head
        tied = getattr(head, "embedding", None)
        weight_bytes = model.planned_nbytes(native, dtype)
        head_matrix = tied or head
        layer_flops = sum(
            2 * sum(part.parts.values()) * part.k
            for part in matrices
            if part is not head and part not in gathered and id(part) not in of_experts
        ) + sum(layer.chosen * layer.flops_each for layer in experts)
        in_step = [part for part in matrices if part not in gathered or part is tied]
        of_layers = [part for part in in_step if part is not head_matrix]
        attention = [part for part in parts if isinstance(part, (Attention, LatentAttention))]
        return cls(
            weight_bytes=weight_bytes,
            dense_weight_bytes=weight_bytes
            - sum(part.planned_nbytes(native, dtype) for part in gathered if part is not tied)
            - sum(layer.count * layer.bytes_each for layer in experts),
            head_bytes=head_matrix.planned_nbytes(native, dtype),
            layer_flops_per_token=layer_flops,
            head_flops=2 * sum(head_matrix.parts.values()) * head_matrix.k,
            attention=tuple(_attention_costs(part, kv_dtype or dtype) for part in attention),
            cache=by_lifetime(KVSpec(tuple(layer.cache for layer in model.layers), kv_dtype or dtype)),
            experts=experts,
            code=_usual_code(in_step, dtype),
            layer_code=_usual_code(of_layers or in_step, dtype),
            head_code=_usual_code([head_matrix], dtype),
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers."""
        return sum(layer.kv_bytes for layer in self.attention)

    @property
    def kv_bytes_per_late_token(self) -> int:
        """Of cache that a token of a long sequence takes: layers with a window give back as much as they take."""
        return self.cache.group_bytes * [group.window for group in self.cache.groups].count(None)

    def cached_bytes(self, tokens: int) -> int:
        """Of cache that a sequence of so many tokens takes at most."""
        held = (
            tokens if group.window is None else min(tokens, BLOCK_SIZE * most_kept(group.window, STEP_TOKENS))
            for group in self.cache.groups
        )
        return self.cache.group_bytes * sum(held)

    @property
    def attention_flops_per_pair(self) -> int:
        """Over all layers, for one token that sees one position."""
        return sum(layer.flops_per_pair for layer in self.attention)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer that attends."""
        return tuple(layer.window for layer in self.attention)

    @property
    def decode_weight_bytes(self) -> int:
        """That a step of one token reads."""
        return self.step_weight_bytes(1)

    def step_weight_bytes(self, tokens: int) -> int:
        """That a step of so many tokens reads."""
        return self.dense_weight_bytes + sum(layer.read_bytes(tokens) for layer in self.experts)

    @property
    def mappable_bytes(self) -> int:
        """Of all experts that may stay in a file."""
        return sum(layer.count * layer.mappable_each for layer in self.experts)

    def mapped_bytes(self, tokens: int) -> float:
        """Of those, what a step of so many tokens wants."""
        return sum(layer.count * layer.mappable_each * layer.share_chosen(tokens) for layer in self.experts)

    def decode_bytes(self, batch: int, context: int) -> int:
        """Read by a step in which `batch` sequences of `context` tokens each get one more."""
        return self.step_weight_bytes(batch) + batch * self.kv_bytes(context)

    def decode_flops(self, batch: int, context: int) -> int:
        """Of the same step."""
        return batch * (self.layer_flops_per_token + self.head_flops + self.decode_attention_flops(context))

    def prefill_flops(self, tokens: int) -> int:
        """Of one sequence from its start; the head runs on the last row."""
        return tokens * self.layer_flops_per_token + self.prefill_attention_flops(tokens) + self.head_flops

    def kv_bytes(self, context: int) -> int:
        """Of the keys and values that one more token of a sequence of `context` tokens sees."""
        return sum(layer.kv_bytes * layer.visible(context) for layer in self.attention)

    def decode_attention_flops(self, context: int) -> int:
        """Of one more token of a sequence of `context` tokens."""
        return sum(layer.flops_per_pair * layer.visible(context) for layer in self.attention)

    def prefill_attention_flops(self, tokens: int) -> int:
        """Of one sequence from its start."""
        return sum(layer.flops_per_pair * layer.pairs(tokens) for layer in self.attention)


def _attention_costs(layer: Attention | LatentAttention, kv_dtype: torch.dtype) -> AttentionCosts:
    kv_bytes = KVSpec((layer.cache,), kv_dtype).position_bytes
    if isinstance(layer, LatentAttention):  # a latent is a key and a value
        return AttentionCosts(kv_bytes, 2 * layer.num_heads * (layer.cache.rope_dim + 2 * layer.cache.rank), None)
    cache = layer.cache
    flops_per_pair = 2 * layer.num_heads * (cache.key_dim + cache.value_dim)
    return AttentionCosts(kv_bytes, flops_per_pair, cache.window, cache.chunked)


def _usual_code(matrices: list[Linear], dtype: torch.dtype) -> str | None:
    """That of most of their bytes."""
    sizes: Counter[str | None] = Counter()
    for part in matrices:
        for name, rows in part.parts.items():
            layout = part.plan.layouts.get(name)
            sizes[layout and layout.code] += native.weight_nbytes(rows, part.k, layout or dtype)
    return sizes.most_common(1)[0][0]


def _experts(mixture: MixtureOfExperts) -> list[Linear]:
    return [*mixture.gate_up.experts, *mixture.down.experts]


def _expert_costs(mixture: MixtureOfExperts, dtype: torch.dtype) -> ExpertCosts:
    products, count = (mixture.gate_up, mixture.down), mixture.router.num_experts
    return ExpertCosts(
        count,
        mixture.router.top_k,
        sum(product.planned_nbytes(native, dtype) for product in products) // count,
        sum(2 * product.n * product.k for product in products),
        sum(product.matrix_nbytes(native, dtype) for product in products if product.is_quantised) // count,
    )


def _walk(layer: Layer) -> Iterator[Layer]:
    yield layer
    for child in layer.children():
        yield from _walk(child)
