"""MPNet (all-mpnet-base-v2): RoBERTa without token types, and with a bias of the scores for each distance.

Source: `modeling_mpnet.py` of transformers, which fixes the numbers of buckets and the id of padding in its code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.batch import Positions
from pace.llm.layers import Attention, Linear, NoRotary, TensorSource, Vectors
from pace.llm.models.encoders.bert import BertConfig, LayerNames, RobertaModel
from pace.llm.models.model_config import MAX_POSITIONS, count, token_ids
from pace.ops.protocol import Ops

NUM_BUCKETS = 32
MAX_DISTANCE = 128


@dataclass(frozen=True, kw_only=True)
class MPNetConfig(BertConfig):
    vocab_size: int = count(30527)
    type_vocab_size: int = count(0, maximum=0, minimum=0)
    max_position_embeddings: int = count(512, MAX_POSITIONS, minimum=3)
    relative_attention_num_buckets: int = count(NUM_BUCKETS, minimum=NUM_BUCKETS)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)

    padding: ClassVar[int] = 1
    """The id of padding, also if `pad_token_id` is another one."""


class MPNetModel(RobertaModel):
    Config = MPNetConfig
    prefix = "mpnet."
    layer_names = LayerNames(
        "attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o", "attention.LayerNorm"
    )

    config: MPNetConfig

    def __init__(self, config: MPNetConfig, dtype: torch.dtype, ops: Ops):
        self.biases = DistanceBiases(
            "mpnet.encoder.relative_attention_bias", config.relative_attention_num_buckets, config.num_attention_heads
        )
        super().__init__(config, dtype, ops)

    def make_attention(self, names: LayerNames, cache: Positions) -> Attention:
        hidden = self.config.hidden_size
        return Attention(
            Linear({name: hidden for name in (names.query, names.key, names.value)}, hidden, True),
            Linear({names.output: hidden}, hidden, True),
            cache.kv_heads,
            cache,
            NoRotary(),
            biases=self.biases.by_distance,
        )


class DistanceBiases(Vectors):
    """Biases of the scores, for each bucket of distances and each head: `{name}.weight [buckets, heads]`."""

    def __init__(self, name: str, num_buckets: int, num_heads: int):
        tensor = f"{name}.weight"
        super().__init__({tensor: num_buckets * num_heads}, {tensor: TensorSource((num_buckets, num_heads))})
        self.num_heads = num_heads

    def by_distance(self) -> Tensor:
        """Returns the biases of `AttentionOptions`: float32 `[heads, 2 * MAX_DISTANCE + 1]`."""
        buckets = [bucket(distance) for distance in range(-MAX_DISTANCE, MAX_DISTANCE + 1)]
        return self.values.view(-1, self.num_heads)[buckets].float().T.contiguous()


def bucket(distance: int) -> int:
    """Returns the bucket of the distance from a token to another one, as in T5. Half of the buckets are for tokens
    after it. Half of these are for one distance each; the others are logarithmic, up to MAX_DISTANCE."""
    half, exact = NUM_BUCKETS // 2, NUM_BUCKETS // 4
    first = half if distance > 0 else 0
    distance = abs(distance)
    if distance < exact:
        return first + distance
    steps = math.log2(distance / exact) / math.log2(MAX_DISTANCE / exact) * (half - exact)
    return first + min(exact + int(steps), half - 1)
