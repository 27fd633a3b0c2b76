"""MPNet (all-mpnet-base-v2): BERT with learned positions, and a bias of the scores for each distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.batch import ForwardBatch, Positions
from pace.llm.layers import (
    Attention,
    Block,
    Embedding,
    LayerNorm,
    Linear,
    NoNorm,
    NoRotary,
    PlainMLP,
    TensorSource,
    Vectors,
)
from pace.llm.models.encoders.encoder import Encoder, EncoderConfig
from pace.llm.models.encoders.heads import Head
from pace.llm.models.model_config import (
    MAX_LAYERS,
    MAX_POSITIONS,
    activation,
    check_divides,
    checked_head_dim,
    count,
    number,
    token_ids,
)
from pace.ops.protocol import ForwardOps, Ops

NUM_BUCKETS = 32
MAX_DISTANCE = 128
"""transformers uses these numbers whatever the config says."""
PADDING = 1
"""Id of the token that has no position of its own, and its position. transformers does not read it from the config."""


@dataclass(frozen=True, kw_only=True)
class MPNetConfig(EncoderConfig):
    vocab_size: int = count(30527)
    hidden_size: int = count(768)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(12)
    intermediate_size: int = count(3072)
    hidden_act: str = activation("gelu")
    max_position_embeddings: int = count(512, MAX_POSITIONS, minimum=PADDING + 2)
    layer_norm_eps: float = number(1e-12, 0.0, 1.0)
    relative_attention_num_buckets: int = count(NUM_BUCKETS, minimum=NUM_BUCKETS)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(2)
    head_dim: int = 0

    def check(self) -> None:
        check_divides(self, "num_attention_heads", "hidden_size")

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return super().derived(fields) | {"head_dim": checked_head_dim(self.hidden_size // self.num_attention_heads)}


class MPNetModel(Encoder):
    Config = MPNetConfig
    prefix = "mpnet."
    ignored_tensors: ClassVar[tuple[str, ...]] = (r".*\.position_ids", r".*pooler\..*", r"lm_head\..*")

    def __init__(self, config: MPNetConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        hidden, name = config.hidden_size, "mpnet.embeddings"
        self.embedding = Embedding(f"{name}.word_embeddings", config.vocab_size, hidden)
        self.positions = Embedding(f"{name}.position_embeddings", config.max_position_embeddings, hidden)
        self.embedding_norm = self.make_norm(f"{name}.LayerNorm")
        self.biases = DistanceBiases(
            "mpnet.encoder.relative_attention_bias", config.relative_attention_num_buckets, config.num_attention_heads
        )
        self.layers = [self.make_layer(f"mpnet.encoder.layer.{i}") for i in range(config.num_hidden_layers)]
        if self.num_labels:
            self.head = Head("classifier.dense", "tanh", "classifier.out_proj", hidden, self.num_labels)

    @property
    def max_length(self) -> int:
        return self.config.max_position_embeddings - PADDING - 1

    def positions_of(self, tokens: np.ndarray) -> np.ndarray:
        """A padding token keeps the position PADDING; others count those that are none, from PADDING + 1 on."""
        counts = tokens != PADDING
        return np.cumsum(counts) * counts + PADDING

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.layer_norm_eps)

    def make_layer(self, name: str) -> Block:
        config = self.config
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        attention = Attention(
            Linear({f"{name}.attention.attn.{part}": hidden for part in "qkv"}, hidden, bias=True),
            Linear({f"{name}.attention.attn.o": hidden}, hidden, bias=True),
            heads,
            Positions(heads, dim, dim),
            NoRotary(),
            biases=self.biases.by_distance,
        )
        mlp = PlainMLP(
            Linear({f"{name}.intermediate.dense": config.intermediate_size}, hidden, bias=True),
            Linear({f"{name}.output.dense": hidden}, config.intermediate_size, bias=True),
            config.hidden_act,
        )
        first, second = (self.make_norm(f"{name}.{part}.LayerNorm") for part in ("attention", "output"))
        return Block(NoNorm(), attention, NoNorm(), mlp, mixer_post_norm=first, mlp_post_norm=second, norms_sum=True)

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        x = self.embedding(ops, batch.tokens) + self.positions(ops, batch.positions)
        return self.embedding_norm(ops, x)


class DistanceBiases(Vectors):
    """A bias of the scores for each bucket of distances and each head: `{name}.weight [buckets, heads]`."""

    def __init__(self, name: str, num_buckets: int, num_heads: int):
        tensor = f"{name}.weight"
        super().__init__({tensor: num_buckets * num_heads}, {tensor: TensorSource((num_buckets, num_heads))})
        self.num_heads = num_heads

    def by_distance(self) -> Tensor:
        """Returns the biases of `AttentionOptions`: float32 `[heads, 2 * MAX_DISTANCE + 1]`."""
        distances = range(-MAX_DISTANCE, MAX_DISTANCE + 1)
        buckets = torch.tensor([bucket(distance) for distance in distances])
        return self.values.view(-1, self.num_heads)[buckets].float().T.contiguous()


def bucket(distance: int) -> int:
    """Returns the bucket of the distance from a token to another one, as T5 divides them: half of the buckets are for
    tokens after it. Of each half, one half is for a distance each, and the other is logarithmic up to MAX_DISTANCE."""
    half, exact = NUM_BUCKETS // 2, NUM_BUCKETS // 4
    first = half if distance > 0 else 0
    distance = abs(distance)
    if distance < exact:
        return first + distance
    steps = np.log2(distance / exact) / np.log2(MAX_DISTANCE / exact) * (half - exact)
    return first + min(exact + int(steps), half - 1)
