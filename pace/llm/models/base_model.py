"""Base class of causal language models: the forward pass, the names of its tensors, and reports about its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from pace.batch import ForwardBatch, KVSpec, LayerBlocks, LayerCache
from pace.llm.layers import (
    Block,
    Embedding,
    Layer,
    LayerNorm,
    LMHead,
    NoNorm,
    RMSNorm,
    Rotary,
    Temperature,
    TiedLMHead,
    UnitNorm,
)
from pace.llm.layers.base import FLOAT_DTYPES
from pace.llm.layers.block import MixerBlocks
from pace.llm.layers.rotary import Angles
from pace.llm.loading.fill import TensorReader, load_weights
from pace.llm.loading.packed_weights import WeightsFile
from pace.llm.loading.plan import plan_weights, split_head
from pace.llm.models.model_config import ModelConfig
from pace.llm.models.towers.tower import Tower
from pace.media.media import MediaSpan
from pace.ops.protocol import ForwardOps, Ops
from pace.ops.weight_layout import WeightLayout
from pace.quant import QuantizationConfig

FINAL_NORM = -1
"""The tap after the final norm."""


class Recordable(Protocol):
    """A part of a forward pass."""

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor: ...


class BaseModelForCausalLM(Layer):
    """Embedding, decoder layers, final norm and LM head, which a subclass makes in its initialiser.

    Each decoder layer is called as `layer(ops, x [T, hidden], angles, batch, kv) -> x`. A loaded model is immutable, so
    that several threads may call `forward` if their batches write different targets of the cache."""

    Config: ClassVar[type[ModelConfig]]
    saved_as: ClassVar[str | None] = None
    """The class that `transformers` names in checkpoints of this architecture, if it is another one."""
    prefix: ClassVar[str] = "model."
    """Prefix of all names but the head's. Checkpoints of the bare decoder lack it and load as well."""
    embedding_name: ClassVar[str] = "model.embed_tokens"
    ignored_tensors: ClassVar[tuple[str, ...]] = (r".*\.rotary_emb\.inv_freq",)
    """Regular expressions of tensors in checkpoints that are ignored, such as buffers that are computed here."""

    other_names: ClassVar[Mapping[str, str]] = {}
    """Regular expressions of other names for tensors, and the name used here."""
    text_prefixes: ClassVar[Mapping[str, str]] = {}
    """Prefixes of names in checkpoints that name a part differently or also take images or sound, and the prefix used
    here. An example is `lm_head.` for the head."""
    other_parts: ClassVar[tuple[str, ...]] = ()
    """Prefixes of tensors that are ignored in such checkpoints, unless a tower has them: encoders of images and
    sound."""

    embedding: Embedding
    rotaries: tuple[Rotary | Temperature, ...] = ()
    """The rotations of its layers: number i makes table i of a step's angles. Empty if positions are learned."""
    layers: list[Block]
    final_norm: RMSNorm | LayerNorm | UnitNorm | NoNorm
    lm_head: LMHead | TiedLMHead
    stored_as: str | None = None
    """The weight file's own name for its quantisation."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ops: Ops):
        """Takes no memory yet: `load_weights` allocates after checking that the checkpoint fits. Matrices are stored in
        `dtype`, and so are keys and values unless `kv_dtype` is changed. `ops` is the implementation that packs and
        computes."""
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, FLOAT_DTYPES))}; got {dtype}")
        self.config = config
        self.dtype = dtype
        self.kv_dtype = dtype
        """Dtype of keys and values: a float dtype, or int8. May be changed until a cache is made for `kv_spec`."""
        self.ops = ops
        self.quantization: QuantizationConfig | None = None
        self.weights_file: WeightsFile | None = None
        """The file from which `load_weights` maps packed weights; None for weights in memory."""
        self.taps: tuple[int, ...] = ()
        """Layers whose inputs a step also writes to `batch.kept`, side by side. The number of layers stands for the
        output of the last one, `FINAL_NORM` for that of the final norm. To be set before a runner is made."""
        self.towers: list[Tower] = []
        """Encoders of images and sound, at most one of each kind. Loading drops those that the checkpoint lacks."""

    # -------------------------------------------------------------------------------------------------------------
    # the engine's interface

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Maximum sequence length of the model's config."""
        return self.config.max_length

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
        return KVSpec(tuple(cache for layer in self.layers for cache in _each(layer.cache)), self.kv_dtype)

    @property
    def num_tail_layers(self) -> int:
        """Number of the last layers that keep nothing. They run only for tokens whose logits are wanted."""
        return 0

    @property
    def stages(self) -> tuple[Recordable, Recordable] | None:
        """With tail layers, the forward pass in two parts. The first one returns `[T, hidden]`, and the second one
        reads that as given rows (`ForwardBatch.of_wanted_tokens`), with the same bits as `compute`."""
        return None

    @property
    def layers_aside(self) -> list[Layer]:
        """Layers that the forward pass does not run."""
        return list(self.towers)

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
        x = self.embed(ops, batch)
        x = self.run_layers(ops, x, x, angles, batch, range(len(self.layers)))
        self._keep(batch, x, len(self.layers))
        if FINAL_NORM not in self.taps:
            return self.head(ops, x[batch.logit_rows])
        x = self.final_norm(ops, x)
        self._keep(batch, x, FINAL_NORM)
        return self.logits(ops, x[batch.logit_rows])

    def ignored(self) -> Iterator[str]:
        """Yields regular expressions of tensors in checkpoints that are ignored."""
        yield from self.ignored_tensors

    @property
    def kept_width(self) -> int:
        """Columns of `batch.kept`; 0 if nothing is kept."""
        return len(self.taps) * self.hidden_size

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.embedding.k

    def _keep(self, batch: ForwardBatch, x: Tensor, tap: int) -> None:
        """Writes x to its columns of the kept rows, if it is wanted."""
        for place, wanted in enumerate(self.taps):
            if wanted == tap:
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

    def head(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """Returns the logits of the last layer's output `x [R, hidden]`."""
        return self.logits(ops, self.final_norm(ops, x))

    def logits(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """Returns the logits of the final norm's output `x [R, hidden]`."""
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

    def add_mtp(self) -> None:
        """Adds the layer for multi-token prediction, to be loaded with the model. Raises NotImplementedError for a
        family without one."""
        raise NotImplementedError(
            f'spec_config="mtp" is not implemented for {type(self).__name__}; use PromptLookupConfig or '
            "DraftModelConfig for drafts"
        )

    # -------------------------------------------------------------------------------------------------------------
    # loading

    def quantize(self, config: QuantizationConfig | None) -> None:
        """Sets how `load_weights` quantises the matrices of a float checkpoint; None for not at all. Raises ValueError
        for a config that does not fit this model."""
        split_head(self, config)
        plan_weights(self, self.lm_head, config, {})
        self.quantization = config

    def load_weights(
        self, reader: TensorReader, workers: int = 1, progress: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        """Fills every weight from a checkpoint, as `pace.llm.loading.fill.load_weights`."""
        load_weights(self, reader, workers, progress)

    # -------------------------------------------------------------------------------------------------------------
    # reports

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of the loaded weights by part of the model: embedding, attention, MLP, norms, LM head. A tied matrix
        counts for the embedding."""
        return self._totals(lambda part: part.nbytes)

    @property
    def mapped_nbytes(self) -> int:
        """Bytes of the weights that are in a file."""
        return sum(layer.in_file.nbytes for layer in [*self.stacks(), *self.matrices()] if layer.in_file)

    @property
    def file_nbytes(self) -> int:
        """Bytes of the tables that stay in the checkpoint's files, and are read row by row."""
        return sum(table.file_nbytes for table in self.tables())

    @property
    def usual_layout(self) -> WeightLayout | None:
        """The code layout with the most bytes; None if all weights are floats."""
        sizes: Counter[WeightLayout] = Counter()
        for matrix in self.matrices():
            for part, layout in matrix.plan.layouts.items():
                sizes[layout] += self.ops.weight_nbytes(matrix.parts[part], matrix.k, layout)
        return sizes.most_common(1)[0][0] if sizes else None

    @property
    def storage_name(self) -> str:
        """Name of the format of most weights: the requested format, that of a quantised checkpoint, or a dtype. A GGUF
        file's own name is used, such as "Q4_K_M"."""
        asked, stored = self.quantization and self.quantization.format, self.usual_layout
        plans = [matrix.plan for matrix in self.matrices()]
        if self.quantization and not asked and all(plan.formats or not plan.layouts for plan in plans):
            stored = None  # only the exceptions of the config are quantised
        return str(asked or (stored and self.stored_as) or stored or self.dtype).removeprefix("torch.")

    def weight_counts(self) -> dict[str, int]:
        """Elements of the weights by part, as in `resident_bytes`."""
        return self._totals(lambda part: part.num_weights)

    def _totals(self, size: Callable[[Layer], int]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for child in self.children():
            inside = child.children() if child in self.layers else [child]
            for part in inside:
                totals[type(part).__name__] += size(part)
        return dict(totals)


def _each(cache: LayerCache | tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
    """The caches of a layer; usually one."""
    return cache if isinstance(cache, tuple) else (cache,)
