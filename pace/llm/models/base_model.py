"""Base class of causal language models: the forward pass, and what the engine asks of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pace.batch import ForwardBatch, KVSpec, LayerBlocks, LayerCache
from pace.llm.layers import (
    Block,
    Embedding,
    FloatLinear,
    LayerNorm,
    LMHead,
    NoNorm,
    RMSNorm,
    Rotary,
    Temperature,
    TiedLMHead,
    UnitNorm,
)
from pace.llm.layers.block import MixerBlocks
from pace.llm.layers.rotary import Angles
from pace.llm.models.model import Model
from pace.llm.models.model_config import ModelConfig
from pace.llm.models.towers.tower import Tower
from pace.media.media import MediaSpan
from pace.ops.protocol import ForwardOps, Ops

FINAL_NORM = -1
"""The tap after the final norm."""
WANTED_NORM = -2
"""The same tap, if only rows of tokens whose logits are wanted are read. The others may be undefined."""


class Recordable(Protocol):
    """A part of a forward pass."""

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor: ...


class BaseModelForCausalLM(Model):
    """Embedding, decoder layers, final norm and LM head, which a subclass makes in its initialiser.

    Each decoder layer is called as `layer(ops, x [T, hidden], angles, batch, kv) -> x`. A loaded model is immutable, so
    that several threads may call `forward` if their batches write different targets of the cache."""

    embedding: Embedding
    rotaries: tuple[Rotary | Temperature, ...] = ()
    """The rotations of its layers: number i makes table i of a step's angles. Empty if positions are learned."""
    layers: list[Block]
    whole_media: bool = False
    """True if the rows of an image see all of it. Then a step never has a part of an image."""
    sees_beyond_windows: bool = False
    """With `whole_media`, true if they see all of it even if a layer's window is shorter."""
    stand_ins: Mapping[int, int] = {}
    """Tokens that are read as others: placeholders of media, whose rows get the embeddings for layers of another
    token."""
    final_norm: RMSNorm | LayerNorm | UnitNorm | NoNorm
    lm_head: LMHead | TiedLMHead | None
    """None for a model that only gives rows; its logits are then the rows of the final norm."""
    classifier: FloatLinear | None = None
    """Logits `[N, labels]` of rows of a `*ForSequenceClassification`."""
    has_optional_head: bool = False
    """True if loading drops the head where the checkpoint has none."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ops: Ops):
        """Keys and values are stored in `dtype`, unless `kv_dtype` is changed."""
        super().__init__(config, dtype, ops)
        self.kv_dtype = dtype
        """Dtype of keys and values: a float dtype, or int8. May be changed until a cache is made for `kv_spec`."""
        self.taps: tuple[int, ...] = ()
        """Layers whose inputs a step also writes to `batch.kept`, side by side. The number of layers stands for the
        output of the last one, `FINAL_NORM` and `WANTED_NORM` for that of the final norm. To be set before a runner
        is made."""
        self.kept_before = 0
        """Number of positions before windows that are kept, as in `KVSpec`. May be changed until a cache is made."""

    @classmethod
    def converted(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """A parsed config.json in the form that transformers has for the same model; `raw` itself if it has that form.
        Raises ValueError or NotImplementedError that names the field."""
        return raw

    @classmethod
    def variant(cls, raw: dict[str, Any]) -> type[BaseModelForCausalLM]:
        """The class for a parsed config.json, where an architecture may have several kinds of text model. Raises
        NotImplementedError for a kind that is not implemented."""
        return cls

    # -------------------------------------------------------------------------------------------------------------
    # the engine's interface

    @property
    def max_position_embeddings(self) -> int:
        """Maximum sequence length of the model's config."""
        return self.config.max_length

    @property
    def length_field(self) -> str:
        """Name of the config's field that sets this maximum, for messages."""
        return self.config.length_field

    @property
    def recompute_length(self) -> int | None:
        """Length at which a sequence that started shorter is recomputed as a prompt, because the angles of its earlier
        tokens change there. None for never."""
        return None

    def rope_regime(self, length: int) -> int:
        """Identifies the angles of a prompt of this length. Prompts with the same number have the same angles at each
        position, so a shared prefix has the same keys and values. `RopeConfig` lists the kinds that depend on the
        length."""
        # No regime decreases with the length: if the sums are equal, all regimes are.
        return sum(rotary.regime(length) for rotary in self.rotaries)

    @property
    def kv_spec(self) -> KVSpec:
        """The cache of the model: what the mixers of each layer keep, layer by layer."""
        layers = tuple(cache for layer in self.layers for cache in _each(layer.cache))
        return KVSpec(layers, self.kv_dtype, kept_before=self.kept_before)

    @property
    def num_tail_layers(self) -> int:
        """Number of the last layers that keep nothing. They run only for tokens whose logits are wanted."""
        return 0

    @property
    def stages(self) -> tuple[Recordable, Recordable] | None:
        """With tail layers, the forward pass in two parts. The first one returns `[T, hidden]`, and the second one
        reads that as given rows (`ForwardBatch.of_wanted_tokens`), with the same bits as `compute`."""
        return None

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Returns logits `[R, V]` of `batch.logit_rows`, op by op; writes the batch's targets of the cache."""
        return self.compute(self.ops, batch, self.angles(batch))

    def tower(self, kind: str) -> Tower:
        """The tower of a kind of media, which must be there."""
        return next(tower for tower in self.towers if tower.kind == kind)

    def angle_positions(self, media: Sequence[MediaSpan], start: int, end: int) -> np.ndarray | None:
        """Positions in time, height and width, int64 `[3, end - start]`, of tokens `start .. end` of a sequence with
        these media. None: the position of a token is its index."""
        return None

    def angles(self, batch: ForwardBatch) -> Angles:
        """The angles of every token of the step for each of `rotaries`; plain torch."""
        positions = batch.positions if batch.angle_positions is None else batch.angle_positions
        return tuple([rotary.angles(positions, batch.rope_lengths) for rotary in self.rotaries])

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        """`forward` after the angles are computed: only `ops`, views, sums and the choice of rows, so that it can be
        recorded (pace/graph). The final norm and the head run only on the logit rows."""
        return self.logits(ops, self.final_rows(ops, batch, angles))

    def final_rows(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        """`compute` without the head: the rows `[R, row_size]` of the final norm that belong to `batch.logit_rows`."""
        x = self.embed(ops, batch)
        x = self.run_layers(ops, x, x, angles, batch, range(len(self.layers)))
        return self.last_rows(ops, batch, x)

    def last_rows(self, ops: ForwardOps, batch: ForwardBatch, x: Tensor) -> Tensor:
        """`final_rows` after the last layer, whose output is `x [T, hidden]`."""
        self._keep(batch, x, len(self.layers))
        if not {FINAL_NORM, WANTED_NORM} & {*self.taps}:
            return self.final_norm(ops, x[batch.logit_rows])
        x = self.final_norm(ops, x)
        self._keep(batch, x, FINAL_NORM, WANTED_NORM)
        return x[batch.logit_rows]

    @property
    def row_size(self) -> int:
        """Width of the rows of the final norm."""
        return self.hidden_size

    @property
    def kept_width(self) -> int:
        """Columns of `batch.kept`; 0 if nothing is kept."""
        return len(self.taps) * self.hidden_size

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.embedding.k

    def _keep(self, batch: ForwardBatch, x: Tensor, *taps: int) -> None:
        """Writes x to its columns of the kept rows, if it is wanted."""
        for place, wanted in enumerate(self.taps):
            if wanted in taps:
                batch.kept[:, place * self.hidden_size : (place + 1) * self.hidden_size] = x

    def run_layers(
        self, ops: ForwardOps, x: Tensor, embeddings: Tensor, angles: Angles, batch: ForwardBatch, layers: range
    ) -> Tensor:
        """Runs some of the layers on `x [T, hidden]`. `embeddings`: the result of `embed`."""
        arguments, caches = self.layer_arguments(ops, embeddings, batch), list(self._of_layers(batch.kv))
        for index in layers:
            kv = caches[index]
            self._keep(batch, x, index)
            x = self.layers[index](ops, x, angles, batch.of_layer(kv), kv, *arguments[index])
            self.after_layer(ops, batch, x, index)
        return x

    @property
    def hidden_elements(self) -> int:
        """Elements of a token's hidden state, and of the further arguments of all layers."""
        return self.config.hidden_size

    def layer_arguments(self, ops: ForwardOps, embeddings: Tensor, batch: ForwardBatch) -> list[tuple[Tensor, ...]]:
        """Further arguments of each layer, computed from `embeddings [T, hidden]` and the batch's tokens."""
        return [()] * len(self.layers)

    def _of_layers(self, kv: list[LayerBlocks]) -> Iterator[MixerBlocks]:
        """Yields the cache of each layer."""
        parts = iter(kv)
        for layer in self.layers:
            found = tuple(islice(parts, len(_each(layer.cache))))
            yield found if isinstance(layer.cache, tuple) else found[0]

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        """Returns `[T, hidden]`: the input of the first layer."""
        x = self.embedding(ops, batch.tokens)
        if self.embedding_scale != 1.0:
            ops.scale_(x, self.embedding_scale)
        return x

    def after_layer(self, ops: ForwardOps, batch: ForwardBatch, x: Tensor, index: int) -> None:
        """Changes `x [T, hidden]`, the output of a layer, in place."""

    def logits(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """Returns the logits of the final norm's output `x [R, row_size]`; without a head, x itself."""
        if self.lm_head is None:
            return x
        logits = self.lm_head(ops, x)
        if self.config.logits_scale != 1.0:
            ops.scale_(logits, self.config.logits_scale)
        if self.config.logits_softcap is not None:
            ops.softcap_(logits, self.config.logits_softcap)
        return logits

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings."""
        return self.config.embedding_scale

    def make_head(self, k: int, bias: bool = False) -> LMHead | TiedLMHead:
        """Makes the LM head over `k` elements, tied or not by the config; for initialisers, after `self.embedding`."""
        if self.config.tie_word_embeddings:
            return TiedLMHead("lm_head", self.embedding, self.config.vocab_size, bias)
        return LMHead("lm_head", self.config.vocab_size, k, bias)

    def add_classifier(self, num_labels: int) -> None:
        """Replaces the LM head by the classifier of a `*ForSequenceClassification`, to be loaded with the model."""
        self.lm_head = None
        self.classifier = FloatLinear({"score": num_labels}, self.row_size)

    def add_mtp(self) -> None:
        """Adds the layer for multi-token prediction, to be loaded with the model. Raises NotImplementedError for a
        family without one."""
        raise NotImplementedError(
            f'spec_config="mtp" is not implemented for {type(self).__name__}; use PromptLookupConfig or '
            "DraftModelConfig for drafts"
        )


def _each(cache: LayerCache | tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
    """The caches of a layer; usually one."""
    return cache if isinstance(cache, tuple) else (cache,)
