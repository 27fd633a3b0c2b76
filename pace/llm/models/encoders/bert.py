"""BERT and its relatives: RoBERTa, XLM-RoBERTa and CamemBERT, DistilBERT, ELECTRA.

Embeddings of words, types and learned positions, and layers with a norm after each sum. MiniLM, BGE, E5 and GTE-small
are BERTs. Source: `modeling_bert.py`, `modeling_roberta.py`, `modeling_distilbert.py` and `modeling_electra.py` of
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace.batch import ForwardBatch, Positions
from pace.llm.layers import Attention, Block, Embedding, Layer, LayerNorm, Linear, NoNorm, NoRotary, PlainMLP
from pace.llm.models.encoders.encoder import Encoder, EncoderConfig
from pace.llm.models.encoders.heads import Head
from pace.llm.models.families.equal_heads import EqualHeadsConfig
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, activation, count, number, token_ids
from pace.ops.protocol import ForwardOps, Ops


@dataclass(frozen=True, kw_only=True)
class BertConfig(EqualHeadsConfig, EncoderConfig):
    vocab_size: int = count(30522)
    hidden_size: int = count(768)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(12)
    intermediate_size: int = count(3072)
    hidden_act: str = activation("gelu")
    max_position_embeddings: int = count(512, MAX_POSITIONS)
    type_vocab_size: int = count(2)
    layer_norm_eps: float = number(1e-12, 0.0, 1.0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    only_here: ClassVar[dict[str, tuple]] = {
        "is_decoder": (None, False),
        "position_embedding_type": (None, "absolute"),
    }

    @property
    def embedding_size(self) -> int:
        """Floats of an embedding."""
        return self.hidden_size


class LayerNames(NamedTuple):
    """Names of the parts of a layer."""

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


class NoEmbedding(Layer):
    """Null object for a model without token types."""

    def add(self, ops: ForwardOps, x: Tensor, batch: ForwardBatch) -> Tensor:
        return x


class SmallEmbedding(Embedding):
    """A table of positions or types, which no QuantizationConfig quantises."""

    keeps_floats = True


class TypeEmbedding(SmallEmbedding):
    """Adds a row for the type of each token."""

    def add(self, ops: ForwardOps, x: Tensor, batch: ForwardBatch) -> Tensor:
        return x + self(ops, batch.types)


class BertModel(Encoder):
    Config = BertConfig
    prefix = "bert."
    outside = ("classifier.", "cls.")
    ignored_tensors = (r".*embeddings\.(position|token_type)_ids", r".*\.pooler\.dense\..*", r"cls\..*")
    other_names: ClassVar[Mapping[str, str]] = {
        r"LayerNorm\.gamma$": "LayerNorm.weight",
        r"LayerNorm\.beta$": "LayerNorm.bias",
    }
    layers_name: ClassVar[str] = "encoder.layer"
    layer_names: ClassVar[LayerNames] = LayerNames()

    config: BertConfig

    def __init__(self, config: BertConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        name, width = f"{self.prefix}embeddings", config.embedding_size
        self.embedding = Embedding(f"{name}.word_embeddings", config.vocab_size, width)
        self.types: TypeEmbedding | NoEmbedding = NoEmbedding()
        if config.type_vocab_size:
            self.types = TypeEmbedding(f"{name}.token_type_embeddings", config.type_vocab_size, width)
        self.positions = SmallEmbedding(f"{name}.position_embeddings", config.max_position_embeddings, width)
        self.embedding_norm = LayerNorm(f"{name}.LayerNorm", width, config.layer_norm_eps)
        self.layers = [self.make_layer(index) for index in range(config.num_hidden_layers)]
        if config.labels:
            self.head = self.make_head()

    def make_layer(self, index: int) -> Block:
        """`norm(x + attention(x))`, then `norm(x + mlp(x))`."""
        config, name = self.config, f"{self.prefix}{self.layers_name}.{index}"
        names = LayerNames(*[f"{name}.{part}" for part in self.layer_names])
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        norms = [LayerNorm(norm, hidden, config.layer_norm_eps) for norm in (names.attention_norm, names.mlp_norm)]
        mlp = PlainMLP.named(names.up, names.down, hidden, inner, config.hidden_act, bias=True)
        return Block(
            NoNorm(),
            self.make_attention(names, Positions(heads, config.head_dim, config.head_dim)),
            NoNorm(),
            mlp,
            mixer_post_norm=norms[0],
            mlp_post_norm=norms[1],
            norms_sum=True,
        )

    def make_attention(self, names: LayerNames, cache: Positions) -> Attention:
        hidden = self.config.hidden_size
        qkv = Linear({name: hidden for name in (names.query, names.key, names.value)}, hidden, True)
        return Attention(qkv, Linear({names.output: hidden}, hidden, True), cache.kv_heads, cache, NoRotary())

    def make_head(self) -> Head:
        """The pooler, and a product."""
        return self.head_of(f"{self.prefix}pooler.dense", "tanh", "classifier")

    def head_of(self, dense: str, activation: str, output: str) -> Head:
        """A head with these tensors."""
        return Head(dense, activation, output, self.config.hidden_size, self.num_labels)

    @property
    def num_types(self) -> int:
        return self.config.type_vocab_size

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        x = self.types.add(ops, self.embedding(ops, batch.tokens), batch)
        return self.embedding_norm(ops, x + self.positions(ops, batch.positions))


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    vocab_size: int = count(50265)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)

    def check(self) -> None:
        super().check()
        pad = self.pad_token_id
        if type(pad) is not int or not 0 <= pad < self.max_position_embeddings - 1:
            raise ValueError(
                "config.json: pad_token_id must be an id below max_position_embeddings - 1, as positions are counted "
                f"from it; got {pad} and {self.max_position_embeddings} positions"
            )

    @property
    def padding(self) -> int:
        """The id of padding, which `check` has checked."""
        assert isinstance(self.pad_token_id, int)
        return self.pad_token_id


class RobertaModel(BertModel):
    """Positions are counted from `padding + 1`, without tokens of padding, whose
    position is `padding`."""

    Config = RobertaConfig
    config: RobertaConfig
    prefix = "roberta."
    outside = ("classifier.", "lm_head.")
    ignored_tensors = (*BertModel.ignored_tensors, r"lm_head\..*")

    @property
    def max_length(self) -> int:
        return self.config.max_position_embeddings - self.config.padding - 1

    def positions_of(self, tokens: np.ndarray) -> np.ndarray:
        pad = self.config.padding
        is_text = tokens != pad
        return np.cumsum(is_text) * is_text + pad

    def make_head(self) -> Head:
        return self.head_of("classifier.dense", "tanh", "classifier.out_proj")


@dataclass(frozen=True, kw_only=True)
class XLMRobertaConfig(RobertaConfig):
    vocab_size: int = count(30522)


class XLMRobertaModel(RobertaModel):
    """XLM-RoBERTa and CamemBERT."""

    Config = XLMRobertaConfig


@dataclass(frozen=True, kw_only=True)
class DistilBertConfig(BertConfig):
    num_hidden_layers: int = count(6, MAX_LAYERS)
    type_vocab_size: int = count(0, maximum=0, minimum=0)

    aliases: ClassVar[dict[str, str]] = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
        "activation": "hidden_act",
    }
    without_effect: ClassVar[dict[str, tuple]] = {
        "layer_norm_eps": (1e-12,),
        "sinusoidal_pos_embds": (False, True),  # the checkpoint has their rows
        "type_vocab_size": (0,),
    }


class DistilBertModel(BertModel):
    Config = DistilBertConfig
    prefix = "distilbert."
    outside = ("pre_classifier.", "classifier.", "vocab_")
    ignored_tensors = (*BertModel.ignored_tensors, r"vocab_(transform|layer_norm|projector)\..*")
    layers_name = "transformer.layer"
    layer_names = LayerNames(
        "attention.q_lin",
        "attention.k_lin",
        "attention.v_lin",
        "attention.out_lin",
        "sa_layer_norm",
        "ffn.lin1",
        "ffn.lin2",
        "output_layer_norm",
    )

    def make_head(self) -> Head:
        return self.head_of("pre_classifier", "relu", "classifier")


@dataclass(frozen=True, kw_only=True)
class ElectraConfig(BertConfig):
    embedding_size: int = count(128)
    hidden_size: int = count(256)
    num_attention_heads: int = count(4)
    intermediate_size: int = count(1024)


class ElectraModel(BertModel):
    """The discriminator. Its embeddings may be narrower than its rows."""

    Config = ElectraConfig
    prefix = "electra."
    outside = ("classifier.", "discriminator_predictions.", "generator_predictions.", "generator_lm_head.")
    ignored_tensors = (*BertModel.ignored_tensors, r"(discriminator|generator)_(predictions|lm_head)\..*")

    def __init__(self, config: ElectraConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.projection: Linear | None = None
        if config.embedding_size != config.hidden_size:
            name = f"{self.prefix}embeddings_project"
            self.projection = Linear({name: config.hidden_size}, config.embedding_size, True)

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        x = super().embed(ops, batch)
        return x if self.projection is None else self.projection(ops, x)

    def make_head(self) -> Head:
        return self.head_of("classifier.dense", "gelu", "classifier.out_proj")
