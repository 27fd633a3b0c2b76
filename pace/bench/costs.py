"""Costs of a model, computed from its config: bytes of weights and cache, bytes moved and operations of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pace.batch import BLOCK_SIZE, KVSpec
from pace.llm.cache.groups import by_lifetime, most_kept
from pace.llm.cache.manager import STEP_TOKENS
from pace.llm.layers import Attention, DeltaNet, Embedding, LatentAttention, Linear, MixtureOfExperts
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.ops import native
from pace.states import SlotSpec, State


class AttentionCosts(NamedTuple):
    """Costs of one attention layer."""

    kv_bytes: int
    """Bytes of the key and the value of one position."""
    flops_per_pair: int
    """Operations for one token and one position that it sees."""
    window: int | None
    """Number of positions that a token sees, itself included; None for all."""
    chunked: bool = False
    """True if a token sees only positions of its own chunk of `window` positions."""
    in_tail: bool = False
    """True if it runs only for rows of logits."""

    def visible(self, context: int) -> int:
        """Number of positions that the last of `context` tokens sees."""
        if self.chunked:
            return context and (context - 1) % self.window + 1
        return min(context, self.window or context)

    def pairs(self, tokens: int) -> int:
        """Number of pairs of a token (of the `tokens` of a prompt) and a position that it sees, itself included."""
        if self.in_tail:
            return self.visible(tokens)
        if self.chunked:
            whole, rest = divmod(tokens, self.window)
            return whole * self.window * (self.window + 1) // 2 + rest * (rest + 1) // 2
        first = self.visible(tokens)
        return first * (first + 1) // 2 + (tokens - first) * first


class StateCosts(NamedTuple):
    """Costs of one layer with a state."""

    state_bytes: int
    """Bytes of the state of a sequence. A step reads them once and writes them once, however many tokens it has."""
    flops_per_token: int
    """Operations of the convolution and of the recurrence."""


class ExpertCosts(NamedTuple):
    """Costs of the experts of one layer."""

    count: int
    chosen: int
    """Experts that each token chooses."""
    bytes_each: int
    flops_each: int
    """Operations of one expert for one token."""
    mappable_each: int
    """Part of `bytes_each` that may stay in a file (`weights="mapped"`)."""

    def read_bytes(self, tokens: int) -> int:
        """Expected bytes that a step of `tokens` tokens reads, if each chooses its experts uniformly at random."""
        return round(self.bytes_each * self.count * self.share_chosen(tokens))

    def share_chosen(self, tokens: int) -> float:
        """Expected share of the experts that a step of `tokens` tokens chooses."""
        return 1 - (1 - self.chosen / self.count) ** tokens


@dataclass(frozen=True)
class Costs:
    """Costs of a model: weights in one dtype, or quantised as planned; keys and values in another dtype. Units are
    bytes and operations (a multiply-add is two)."""

    weight_bytes: int
    """Resident bytes, in the layout of the kernels."""
    dense_weight_bytes: int
    """Bytes that every step reads: all weights except towers, experts and an untied embedding (a step only reads single
    rows of it)."""
    head_bytes: int
    """Bytes of the LM head's matrix, a part of `decode_weight_bytes`."""
    layer_flops_per_token: int
    """Operations of the layers' matrices per token, with only the experts that a token chooses."""
    tail_flops: int
    """The part of `layer_flops_per_token` of layers that run only for rows of logits."""
    head_flops: int
    """Operations of the LM head for one row of logits."""
    attention: tuple[AttentionCosts, ...]
    """Costs of each attention layer."""
    states: tuple[StateCosts, ...]
    """Costs of each layer with a state."""
    cache: KVSpec
    """Layout of the cache: keys and values, and states."""
    experts: tuple[ExpertCosts, ...]
    """Costs of each layer that has experts."""
    file_weights: int
    """Elements of tables that stay in a file and are read row by row."""
    code: str | None
    """Code of most of the weight bytes that a step reads (a name of `pace.ops.weight_layout.CODES`); None for
    floats."""
    layer_code: str | None
    """Code of most of the layers' weight bytes."""
    head_code: str | None
    """Code of most of the LM head's bytes."""

    @classmethod
    def of(cls, model: BaseModelForCausalLM, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Costs:
        """Computes the costs of `model`, which need not be loaded. `kv_dtype`: of keys and values; None for `dtype`."""
        parts = [part for child in model.children() if child not in model.towers for part in child.walk()]
        mixtures = [part for part in parts if isinstance(part, MixtureOfExperts)]
        experts = tuple(_expert_costs(mixture, dtype) for mixture in mixtures)
        of_experts = {id(expert) for mixture in mixtures for expert in _experts(mixture)}
        matrices = [part for part in parts if isinstance(part, Linear)]
        gathered = [part for part in matrices if isinstance(part, Embedding)]
        head = model.lm_head
        tied = getattr(head, "embedding", None)
        weight_bytes = model.planned_nbytes(native, dtype)
        tail = [part for layer in model.layers[len(model.layers) - model.num_tail_layers :] for part in layer.walk()]
        head_matrix = tied or head
        layer_flops = sum(
            2 * sum(part.parts.values()) * part.k
            for part in matrices
            if part is not head and part not in gathered and id(part) not in of_experts
        ) + sum(layer.chosen * layer.flops_each for layer in experts)
        in_step = [part for part in matrices if part not in gathered or part is tied]
        of_layers = [part for part in in_step if part is not head_matrix]
        attention = [part for part in parts if isinstance(part, (Attention, LatentAttention))]
        cache = by_lifetime(KVSpec(model.kv_spec.layers, kv_dtype or dtype))
        deltas = {id(part.cache) for part in parts if isinstance(part, DeltaNet)}
        return cls(
            weight_bytes=weight_bytes,
            dense_weight_bytes=weight_bytes
            - sum(tower.planned_nbytes(native, dtype) for tower in model.towers)
            - sum(part.planned_nbytes(native, dtype) for part in gathered if part is not tied)
            - sum(layer.count * layer.bytes_each for layer in experts),
            head_bytes=head_matrix.planned_nbytes(native, dtype),
            layer_flops_per_token=layer_flops,
            tail_flops=sum(2 * part.n * part.k for part in tail if isinstance(part, Linear)),
            head_flops=2 * sum(head_matrix.parts.values()) * head_matrix.k,
            attention=tuple(
                attention_costs(part, kv_dtype or dtype)._replace(in_tail=any(part is other for other in tail))
                for part in attention
            ),
            states=tuple(
                state_costs(state, id(state) in deltas, cache.slots().dtype)
                for state in cache.layers
                if isinstance(state, State)
            ),
            cache=cache,
            experts=experts,
            file_weights=sum(table.num_weights for table in model.tables()),
            code=usual_code(in_step, dtype),
            layer_code=usual_code(of_layers or in_step, dtype),
            head_code=usual_code([head_matrix], dtype),
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, in all layers that keep them."""
        return self.cache.position_bytes

    @property
    def kv_bytes_per_late_token(self) -> int:
        """Cache bytes that one more token of a long sequence takes. Layers with a window free as much as they take."""
        return self.cache.group_bytes * [group.window for group in self.cache.groups].count(None)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states of one sequence, which do not grow with its length."""
        return self.cache.slots().slot_bytes

    @property
    def state_traffic(self) -> int:
        """Bytes of states that a step reads and writes for each sequence."""
        return 2 * sum(layer.state_bytes for layer in self.states)

    @property
    def prompt_flops_per_token(self) -> int:
        """Operations of the layers' matrices for a token of a prompt that needs no logits."""
        return self.layer_flops_per_token - self.tail_flops

    @property
    def state_flops_per_token(self) -> int:
        """Operations of the layers with a state, outside of their matrices, for one token."""
        return sum(layer.flops_per_token for layer in self.states)

    def cached_bytes(self, tokens: int) -> int:
        """Maximum cache bytes of a sequence of `tokens` tokens: its positions, and its states."""
        return self.position_bytes(tokens) + self.slot_bytes

    def position_bytes(self, tokens: int) -> int:
        """Maximum bytes of keys and values that are kept of a sequence of `tokens` tokens."""
        held = (
            tokens if group.window is None else min(tokens, BLOCK_SIZE * most_kept(group.window, STEP_TOKENS))
            for group in self.cache.groups
        )
        return self.cache.group_bytes * sum(held)

    @property
    def decode_weight_bytes(self) -> int:
        """Weight bytes that a step of one token reads."""
        return self.step_weight_bytes(1)

    def step_weight_bytes(self, tokens: int) -> int:
        """Weight bytes that a step of `tokens` tokens reads."""
        return self.dense_weight_bytes + sum(layer.read_bytes(tokens) for layer in self.experts)

    @property
    def mappable_bytes(self) -> int:
        """Bytes of all experts that may stay in a file."""
        return sum(layer.count * layer.mappable_each for layer in self.experts)

    def mapped_bytes(self, tokens: int) -> float:
        """Expected part of `mappable_bytes` that a step of `tokens` tokens uses."""
        return sum(layer.count * layer.mappable_each * layer.share_chosen(tokens) for layer in self.experts)

    def decode_bytes(self, batch: int, context: int) -> int:
        """Bytes moved by a step in which `batch` sequences of `context` tokens get one token each. It reads weights,
        keys and values, and it reads and writes states."""
        return self.step_weight_bytes(batch) + batch * (self.kv_bytes(context) + self.state_traffic)

    def decode_flops(self, batch: int, context: int) -> int:
        """Operations of the step of `decode_bytes`."""
        layers = self.layer_flops_per_token + self.state_flops_per_token
        return batch * (layers + self.head_flops + self.decode_attention_flops(context))

    def prefill_flops(self, tokens: int) -> int:
        """Operations for the prompt of one sequence; the LM head runs on the last row only."""
        layers = self.prompt_flops_per_token + self.state_flops_per_token
        return tokens * layers + self.tail_flops + self.prefill_attention_flops(tokens) + self.head_flops

    def kv_bytes(self, context: int) -> int:
        """Bytes of keys and values that the last of `context` tokens sees."""
        return sum(layer.kv_bytes * layer.visible(context) for layer in self.attention)

    def decode_attention_flops(self, context: int) -> int:
        """Attention operations for the last of `context` tokens."""
        return sum(layer.flops_per_pair * layer.visible(context) for layer in self.attention)

    def prefill_attention_flops(self, tokens: int) -> int:
        """Attention operations for the prompt of one sequence."""
        return sum(layer.flops_per_pair * layer.pairs(tokens) for layer in self.attention)


def attention_costs(layer: Attention | LatentAttention, kv_dtype: torch.dtype) -> AttentionCosts:
    kept = layer.cache if isinstance(layer, LatentAttention) else layer.positions
    kv_bytes = KVSpec((kept,), kv_dtype).position_bytes
    if isinstance(layer, LatentAttention):  # the latent serves as key and value
        return AttentionCosts(kv_bytes, 2 * layer.num_heads * (layer.cache.rope_dim + 2 * layer.cache.rank), None)
    cache = layer.positions
    flops_per_pair = 2 * layer.num_heads * (cache.key_dim + cache.value_dim)
    return AttentionCosts(kv_bytes, flops_per_pair, cache.window, cache.chunked)


def state_costs(state: State, has_delta: bool, dtype: torch.dtype) -> StateCosts:
    """Costs of a layer. For each token, a matrix is multiplied by its decay, updated by a product of two vectors, and
    multiplied by a query. The delta rule also multiplies it by the key."""
    elements = state.heads * state.key_dim * state.value_dim
    return StateCosts(
        SlotSpec((state,), dtype).state_bytes,
        2 * state.kernel * state.channels + (7 if has_delta else 5) * elements,
    )


def usual_code(matrices: list[Linear], dtype: torch.dtype) -> str | None:
    """Code of most of the bytes of `matrices`."""
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
