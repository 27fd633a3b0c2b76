"""The interface of models that draft from the rows of a target model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.towers.tower import Slice


class DraftHeadModel(BaseModelForCausalLM):
    """A model whose given rows are those of a target model. It keeps a row of each token, in the same form: the given
    row of a further draft."""

    target_taps: tuple[int, ...]
    """The `taps` of the target whose rows `encode` takes."""
    sees_inputs: bool = False
    """True if the first of these taps is the input of the target's first layer, which `encode` does not take. It
    follows each given row, and replaces the embedding of a token: an image's rows differ from those of its tokens."""
    target_layers: tuple[int, ...] | None = None
    """For a drafter that sees the target's keys and values: the layer of the target that each of its layers sees. None
    for one with a cache of its own."""
    positions_before: int = 0
    """Number of positions before a window of the target that it sees (`KVSpec.kept_before`)."""

    @property
    def given_width(self) -> int:
        """Columns of the given rows."""
        return self.kept_width + (self.hidden_size if self.sees_inputs else 0)

    def embeddings(self, tokens: Tensor) -> Tensor:
        """The rows `[T, hidden]` that follow the given rows of tokens whose inputs in the target are not known."""
        x = self.embedding(self.ops, tokens)
        if self.embedding_scale != 1.0:
            self.ops.scale_(x, self.embedding_scale)
        return x

    @abstractmethod
    def of_target(self, target: BaseModelForCausalLM) -> DraftHeadModel:
        """Returns this loaded drafter with what it shares with a loaded target. Raises ValueError if it is for another
        one."""

    def encode(self, run: Callable[[Slice, ForwardBatch, Angles], Tensor], rows: Tensor) -> Tensor:
        """Returns the given rows `[T, kept_width]` for rows of the target `[T, W]`. `run` computes a slice."""
        return rows

    def to_target(self, logits: Tensor) -> Tensor:
        """Returns logits `[R, V]` of the target's vocabulary."""
        return logits
