"""A loaded model whose forward pass runs as a `Program`."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from pace.graph import Program
from pace.llm.batch import ForwardBatch, KVSpec
from pace.llm.models.base_model import BaseModelForCausalLM


class CompiledModel:
    """What the engine sees of a model; `forward` gives the bits that the model's own forward gives on the native kernels."""

    def __init__(self, model: BaseModelForCausalLM):
        """Records the forward pass; the model's weights must be loaded."""
        self.model = model
        self.program = Program(model, model.config.num_hidden_layers, model.rotary.half)

    def forward(self, ops: ModuleType, batch: ForwardBatch) -> Tensor:
        """Logits `[R, V]` of `batch.logit_rows`; writes the batch's slots of the cache. `ops` are those it was loaded with."""
        return self.program.run(batch, self.model.angles(batch))

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.model.max_position_embeddings

    @property
    def recompute_length(self) -> int | None:
        return self.model.recompute_length

    @property
    def kv_spec(self) -> KVSpec:
        return self.model.kv_spec
