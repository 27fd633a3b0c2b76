"""`ModelRunner`: a loaded model and a way to compute its forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pace.batch import ForwardBatch, KVSpec
from pace.llm.adapters.adapted import AdaptedOps
from pace.llm.adapters.slots import AdapterSlots
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.towers.tower import Slice, Tower
from pace.llm.operators import OperatorReport
from pace.media.media import Media, MediaSpan


class ModelRunner(ABC):
    """The engine's interface to a model; subclasses implement `forward`."""

    def __init__(self, model: BaseModelForCausalLM):
        """The model's weights must be loaded."""
        self.model = model
        self.adapters = AdapterSlots(model)
        """The adapters that steps may name. May be replaced until one is loaded."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Returns logits `[R, V]` of `batch.logit_rows`; writes the batch's slots of the cache."""

    @abstractmethod
    def final_rows(self, batch: ForwardBatch) -> Tensor:
        """Returns the rows of the final norm `[R, row_size]` that belong to `batch.logit_rows`: `forward` without the
        head."""

    @abstractmethod
    def logits(self, rows: Tensor, routing: Tensor | None = None) -> Tensor:
        """Returns the logits `[R, V]` of rows of the final norm, with the bits of `forward`. `routing [R, 2 k]`: the
        adapters of the rows, as in `ForwardBatch`."""

    def adapted(self, ops: Any, routing: Tensor | None, logit_rows: Tensor | None = None) -> Any:
        """Returns operations with the adapters of `routing`; `ops` without any. `logit_rows`: as in `ForwardBatch`."""
        return ops if routing is None else AdaptedOps(ops, self.adapters.tables, routing, logit_rows)

    @abstractmethod
    def run_slice(self, piece: Slice, batch: ForwardBatch, angles: Angles) -> Tensor:
        """Computes a slice of one of the model's towers: rows `[T, W]`."""

    def encode(self, media: Media) -> Generator[None, None, Tensor]:
        """Encodes an image or a clip slice by slice, as `Tower.encode`; a tower of its kind must be there."""
        return self.model.tower(media.kind).encode(media, self.run_slice)

    @abstractmethod
    def operator_report(self) -> OperatorReport:
        """The implementation of each operator that has run so far."""

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def row_size(self) -> int:
        return self.model.row_size

    @property
    def max_position_embeddings(self) -> int:
        return self.model.max_position_embeddings

    @property
    def length_field(self) -> str:
        return self.model.length_field

    @property
    def recompute_length(self) -> int | None:
        return self.model.recompute_length

    def rope_regime(self, length: int) -> int:
        return self.model.rope_regime(length)

    @property
    def kv_spec(self) -> KVSpec:
        return self.model.kv_spec

    @property
    def kept_width(self) -> int:
        return self.model.kept_width

    @property
    def whole_media(self) -> bool:
        """True if the rows of an image see all of it, and a step must have whole images."""
        return bool(self.model.towers) and self.model.whole_media

    @property
    def sees_beyond_windows(self) -> bool:
        """True if the rows of an image see all of it even beyond the window of a layer."""
        return self.whole_media and self.model.sees_beyond_windows

    @property
    def stand_ins(self) -> Mapping[int, int]:
        return self.model.stand_ins

    @property
    def towers(self) -> list[Tower]:
        return self.model.towers

    def angle_positions(self, media: Sequence[MediaSpan], start: int, end: int) -> np.ndarray | None:
        return self.model.angle_positions(media, start, end)
