"""Base class of all models: the names of its tensors, its loading, and reports about its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import torch

from pace.llm.layers import Layer, LMHead, TiedLMHead
from pace.llm.layers.base import FLOAT_DTYPES
from pace.llm.loading.fill import TensorReader, load_weights
from pace.llm.loading.packed_weights import WeightsFile
from pace.llm.loading.plan import plan_weights, split_head
from pace.llm.models.model_config import ModelConfig
from pace.llm.models.towers.tower import Tower
from pace.naming import dtype_name
from pace.ops.protocol import Ops
from pace.ops.weight_layout import WeightLayout
from pace.quant import QuantizationConfig


class Model(Layer):
    """A model of a checkpoint. A subclass makes its layers in its initialiser. A loaded model is immutable."""

    Config: ClassVar[type[ModelConfig]]
    saved_as: ClassVar[str | None] = None
    """The class that `transformers` names in checkpoints of this architecture, if it is another one."""
    prefix: ClassVar[str] = "model."
    """Prefix of all names but those of `outside`. Checkpoints of the bare decoder or encoder lack it and load as
    well."""
    outside: ClassVar[tuple[str, ...]] = ("lm_head.",)
    """Prefixes of names that `prefix` is not a part of: the head's."""
    embedding_name: ClassVar[str] = "model.embed_tokens"
    ignored_tensors: ClassVar[tuple[str, ...]] = (r".*\.rotary_emb\.inv_freq",)
    """Regular expressions of tensors in checkpoints that are ignored, such as buffers that are computed here."""
    tensors_apart: ClassVar[tuple[str, ...]] = ()
    """Regular expressions of tensors that are read after loading, such as adapters."""

    other_names: ClassVar[Mapping[str, str]] = {}
    """Regular expressions of other names for tensors, and the name used here."""
    text_prefixes: ClassVar[Mapping[str, str]] = {}
    """Prefixes of names in checkpoints that name a part differently or also take images or sound, and the prefix used
    here. An example is `lm_head.` for the head."""
    other_parts: ClassVar[tuple[str, ...]] = ()
    """Prefixes of tensors that are ignored in such checkpoints, unless a tower has them: encoders of images and
    sound."""

    layers: list[Layer]
    lm_head: LMHead | TiedLMHead | None = None
    """None for an encoder."""
    stored_as: str | None = None
    """The weight file's own name for its quantisation."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ops: Ops):
        """Takes no memory yet: `load_weights` allocates after checking that the checkpoint fits. Matrices are stored in
        `dtype`. `ops` is the implementation that packs and computes."""
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, FLOAT_DTYPES))}; got {dtype}")
        self.config = config
        self.dtype = dtype
        self.ops = ops
        self.quantization: QuantizationConfig | None = None
        self.weights_file: WeightsFile | None = None
        """The file from which `load_weights` maps packed weights; None for weights in memory."""
        self.towers: list[Tower] = []
        """Encoders of images and sound, at most one of each kind. Loading drops those that the checkpoint lacks."""

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def layers_aside(self) -> list[Layer]:
        """Layers that the forward pass of text does not run."""
        return list(self.towers)

    def ignored(self) -> Iterator[str]:
        """Yields regular expressions of tensors in checkpoints that are ignored."""
        yield from self.ignored_tensors
        yield from self.tensors_apart
        for tower in self.towers:
            yield from tower.unused

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
        return dtype_name(asked or (stored and self.stored_as) or stored or self.dtype)

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
