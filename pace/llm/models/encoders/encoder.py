"""Base class of encoders: a forward pass over whole texts, whose tokens see each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.batch import ForwardBatch, Positions
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.layers import Block, Embedding, LayerNorm, NoNorm, RMSNorm
from pace.llm.layers.rotary import Angles, Rotary
from pace.llm.loading.fill import TensorReader
from pace.llm.models.encoders.heads import Head
from pace.llm.models.model import Model
from pace.llm.models.model_config import ModelConfig
from pace.naming import shown
from pace.ops.protocol import ForwardOps, Ops
from pace.quant.config import AUTO, FLOAT, QuantizationConfig

CLASSIFIER = "ForSequenceClassification"
"""End of the architectures that have a classifier."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """Config of an encoder. Subclasses that override `derived` merge it with the base's."""

    labels: tuple[str, ...] = ()
    """Names of the classifier's labels, in the order of its logits; empty without a classifier."""

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"labels": labels_of(fields)}


class Encoder(Model):
    """Embeddings, layers and a last norm, which a subclass makes in its initialiser. Its tokens see all tokens of their
    own text, or those within a window.

    A layer is a `Block` whose attention keeps nothing after the step. All layers use one scratch of float32 keys and
    values in turn, so they have heads of one shape. `Positions.window = w + 1` shows a token the w before it and the w
    after it."""

    Config: ClassVar[type[EncoderConfig]]

    embedding: Embedding
    layers: list[Block]
    rotaries: tuple[Rotary, ...] = ()
    """The rotations of its layers: number i makes table i of a step's angles. Empty if positions are learned."""
    final_norm: LayerNorm | RMSNorm | NoNorm
    head: Head | None = None
    """The classifier of a `*ForSequenceClassification`."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.final_norm = NoNorm()

    @classmethod
    def describes(cls, raw: Mapping[str, Any]) -> bool:
        """True if a config.json with the name of this class is of such an encoder. Some causal models have the same
        architecture."""
        return True

    def quantize(self, config: QuantizationConfig | None) -> None:
        """Sets how `load_weights` quantises the matrices of layers. Embeddings stay floats, unless the config names
        their format. Raises as `Model.quantize`."""
        if config is not None and config.embedding == AUTO:
            config = QuantizationConfig(
                config.format or FLOAT, embedding=FLOAT, lm_head=config.lm_head, overrides=config.overrides
            )
        super().quantize(config)

    def read_tasks(self, reader: TensorReader) -> list[AdapterWeights]:
        """Returns the adapters for tasks that a checkpoint has, by their names; most have none. Raises ValueError for
        damaged ones."""
        return []

    @property
    def instructions(self) -> Mapping[str, str]:
        """Task -> the text that is put before a text; empty for models without tasks."""
        return {}

    @property
    def hidden_size(self) -> int:
        """Floats of a row."""
        return self.config.hidden_size

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a text."""
        return self.config.max_position_embeddings

    @property
    def num_types(self) -> int:
        """Number of token types. Above 0, a batch has `types`."""
        return 0

    @property
    def num_labels(self) -> int:
        """Logits of the classifier; 0 without one."""
        return len(self.config.labels)

    @cached_property
    def caches(self) -> tuple[Positions, ...]:
        """The forms of attention of the layers, which differ in their windows only. `ForwardBatch.kv` has one entry for
        each, all over the same memory."""
        return tuple(dict.fromkeys(layer.cache for layer in self.layers))

    def positions_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns int64 `[n]`: the position of each token of a text, as embeddings and rotations use it."""
        return np.arange(len(tokens))

    def angles(self, batch: ForwardBatch) -> Angles:
        """The angles of every token of the step for each of `rotaries`; plain torch."""
        return tuple([rotary.angles(batch.positions, batch.rope_lengths) for rotary in self.rotaries])

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        """Returns `[T, hidden]`: the input of the first layer, its norm included."""
        raise NotImplementedError

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        """Returns `[T, hidden]`: the rows of all tokens after the last norm. Only `ops`, views and sums, so that it can
        be recorded (pace/graph)."""
        x = self.embed(ops, batch)
        for layer in self.layers:
            kv = batch.kv[self.caches.index(layer.cache)]
            x = layer(ops, x, angles, batch.of_layer(kv), kv)
        return self.final_norm(ops, x)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Returns the rows `[T, hidden]` of a step, op by op."""
        return self.compute(self.ops, batch, self.angles(batch))


class PooledRows:
    """The forward pass of an encoder up to pooled rows: float32 `[S, P]`, or the logits of its classifier."""

    def __init__(self, encoder: Encoder, pooling: tuple[str, ...], head: Head | None = None):
        """`pooling`: names in `POOLINGS`. `head` computes logits of the pooled rows."""
        self.encoder = encoder
        self.pooling = pooling
        self.head = head

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        x = self.encoder.compute(ops, batch, angles)
        if self.head is not None:
            x = self.head.prepare(ops, x)
        pooled = [ops.pool(x, batch.spans.query_start, name) for name in self.pooling]
        rows = reduce(ops.concatenate, pooled)
        return rows if self.head is None else self.head(ops, rows)


def labels_of(fields: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of a classifier's labels, from a parsed config.json; () for a model without one. Raises as
    `read_labels`."""
    names = fields.get("architectures") or []
    is_classifier = isinstance(names, list) and any(str(name).endswith(CLASSIFIER) for name in names)
    return read_labels(fields) if is_classifier else ()


def read_labels(fields: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of a classifier's labels, from `id2label` or `num_labels` of config.json. The default is two
    labels, as in transformers. Raises ValueError if they are not numbered from 0."""
    names = fields.get("id2label")
    if names is None:
        count = fields.get("num_labels", 2)
        if type(count) is not int or not 1 <= count <= 2**16:
            raise ValueError(f"config.json: num_labels must be an integer from 1 to 65536; got {shown(count)}")
        return tuple(f"LABEL_{index}" for index in range(count))
    numbers = {str(index) for index in range(len(names))} if isinstance(names, dict) else set()
    if not numbers or {str(key) for key in names} != numbers or not all(isinstance(v, str) for v in names.values()):
        raise ValueError(f"config.json: id2label must map the numbers 0, 1, ... to names; got {shown(names)}")
    by_number = {int(key): name for key, name in names.items()}
    return tuple(by_number[index] for index in range(len(names)))
