"""`ModelRunner`: a loaded model and a way to compute its forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from pace.batch import ForwardBatch, KVSpec
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.operators import OperatorReport


class ModelRunner(ABC):
    """The engine's interface to a model; subclasses implement `forward`."""

    def __init__(self, model: BaseModelForCausalLM):
        """The model's weights must be loaded."""
        self.model = model

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Returns logits `[R, V]` of `batch.logit_rows`; writes the batch's slots of the cache."""

    @abstractmethod
    def operator_report(self) -> OperatorReport:
        """The implementation of each operator that has run so far."""

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.model.max_position_embeddings

    @property
    def recompute_length(self) -> int | None:
        return self.model.recompute_length

    def rope_regime(self, length: int) -> int:
        return self.model.rope_regime(length)

    @property
    def kv_spec(self) -> KVSpec:
        return self.model.kv_spec
