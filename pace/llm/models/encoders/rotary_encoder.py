"""Base class of encoders like BERT that rotate queries and keys: nomic-bert, gte and jina v3.

Names are those of transformers. Checkpoints with code of their own have others, and several matrices in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.batch import ForwardBatch, Positions
from pace.llm.layers import (
    Attention,
    Block,
    Embedding,
    FeedForward,
    GatedLinear,
    GatedMLP,
    LayerNorm,
    Linear,
    NoNorm,
    PlainMLP,
    RopeConfig,
    Rotary,
)
from pace.llm.models.encoders.bert import BertModel, NoEmbedding, TypeEmbedding
from pace.llm.models.encoders.encoder import Encoder, EncoderConfig
from pace.llm.models.encoders.heads import Head
from pace.llm.models.model_config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    activation,
    check_divides,
    checked_head_dim,
    count,
    number,
    token_ids,
)
from pace.llm.models.rope_config import ROPE_FIELDS, read_rope
from pace.ops.protocol import ForwardOps, Ops


@dataclass(frozen=True, kw_only=True)
class RotaryEncoderConfig(EncoderConfig):
    hidden_size: int = count(768)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(12)
    head_dim: int | None = count(None, MAX_HEAD_DIM, optional=True)
    intermediate_size: int = count(3072)
    hidden_act: str = activation("gelu")
    max_position_embeddings: int = count(8192, MAX_POSITIONS)
    type_vocab_size: int = count(1, minimum=0)
    layer_norm_eps: float = number(1e-12, 0.0, 1.0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)
    rope: RopeConfig | None = None

    default_theta: ClassVar[float]
    also_read: ClassVar[frozenset[str]] = frozenset(ROPE_FIELDS)

    def check(self) -> None:
        if self.head_dim is None:
            check_divides(self, "num_attention_heads", "hidden_size")

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        head_dim = self.head_dim or checked_head_dim(self.hidden_size // self.num_attention_heads)
        return super().derived(fields) | {"head_dim": head_dim, "rope": self.read_rope(fields, head_dim)}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return read_rope(fields, head_dim, self.max_position_embeddings, default_theta=self.default_theta)


class RotaryEncoder(Encoder):
    """`norm(x + attention(x))`, then `norm(x + mlp(x))`, after a norm of the sum of the embeddings."""

    outside = ("classifier.", "cls.", "lm_head.")
    ignored_tensors = (*BertModel.ignored_tensors, r"lm_head\..*", r".*inv_freq")
    head_names: ClassVar[tuple[str, str]]
    """The two matrices of a classifier."""

    def __init__(self, config: RotaryEncoderConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        hidden, name = config.hidden_size, f"{self.prefix}embeddings"
        self.rotaries = (Rotary(config.rope),)
        self.embedding = Embedding(f"{name}.word_embeddings", config.vocab_size, hidden)
        self.types: TypeEmbedding | NoEmbedding = NoEmbedding()
        if config.type_vocab_size:
            self.types = TypeEmbedding(f"{name}.token_type_embeddings", config.type_vocab_size, hidden)
        self.embedding_norm = self.make_norm(f"{name}.LayerNorm")
        self.layers = [self.make_layer(index) for index in range(config.num_hidden_layers)]
        if self.num_labels:
            dense, output = self.head_names
            self.head = Head(dense, "tanh", output, config.hidden_size, self.num_labels)

    @property
    def num_types(self) -> int:
        return self.config.type_vocab_size

    @property
    def attention_bias(self) -> bool:
        return True

    def make_layer(self, index: int) -> Block:
        name = f"{self.prefix}layers.{index}"
        return Block(
            NoNorm(),
            self.make_attention(f"{name}.self_attn"),
            NoNorm(),
            self.make_feed_forward(f"{name}.mlp", index),
            mixer_post_norm=self.make_norm(f"{name}.post_attention_layernorm"),
            mlp_post_norm=self.make_norm(f"{name}.post_mlp_layernorm"),
            norms_sum=True,
        )

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.layer_norm_eps)

    def make_attention(self, name: str) -> Attention:
        hidden, heads, dim = self.config.hidden_size, self.config.num_attention_heads, self.config.head_dim
        return Attention(
            Linear({f"{name}.{part}_proj": heads * dim for part in "qkv"}, hidden, self.attention_bias),
            Linear({f"{name}.o_proj": hidden}, heads * dim, self.attention_bias),
            heads,
            Positions(heads, dim, dim),
            self.rotaries[0],
        )

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        return self.make_gated(name, False, True)

    def make_gated(self, name: str, up_bias: bool, down_bias: bool) -> GatedMLP:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return GatedMLP(
            GatedLinear({f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden, up_bias),
            Linear({f"{name}.down_proj": hidden}, inner, down_bias),
            self.config.hidden_act,
        )

    def make_plain(self, up: str, down: str, up_bias: bool = True, down_bias: bool = True) -> PlainMLP:
        """A feed-forward without gates, with matrices of these names."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return PlainMLP(
            Linear({up: inner}, hidden, up_bias), Linear({down: hidden}, inner, down_bias), self.config.hidden_act
        )

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        super().choose(tensors)
        for index, layer in enumerate(self.layers):
            name = f"{self.prefix}layers.{index}"
            layer.mixer.qkv.choose_whole(tensors, f"{name}.self_attn.qkv_proj")

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> torch.Tensor:
        return self.embedding_norm(ops, self.types.add(ops, self.embedding(ops, batch.tokens), batch))
