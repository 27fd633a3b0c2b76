"""A model's forward pass with adapters: the model's own code, on operations that add them to its products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import Recordable
from pace.ops.adapters import AdapterRows, AdapterTable, EmbeddingAdapters
from pace.ops.experts import Activation
from pace.ops.file_table import RowTable
from pace.ops.protocol import ForwardOps, Weight


@dataclass(frozen=True)
class AdapterTables:
    """The adapters of a model's products and embeddings. A tied matrix is both."""

    products: Mapping[int, AdapterTable] = field(default_factory=dict)
    """id of a weight -> the adapters of its product."""
    embeddings: Mapping[int, EmbeddingAdapters] = field(default_factory=dict)
    """id of a weight -> the adapters of its rows."""

    def all(self) -> list[AdapterTable | EmbeddingAdapters]:
        return [*self.products.values(), *self.embeddings.values()]

    def __len__(self) -> int:
        return len(self.products) + len(self.embeddings)


class AdaptedModel:
    """The forward pass of a model, or of a stage of it, whose rows have the adapters of `batch.routing`."""

    def __init__(self, model: Recordable, tables: AdapterTables):
        """`tables`: as `AdapterSlots.tables`."""
        self.model = model
        self.tables = tables

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.model.compute(AdaptedOps(ops, self.tables, batch.routing, batch.logit_rows), batch, angles)


class AdaptedOps:
    """`ForwardOps` whose products and embeddings have adapters. All other operations are those of `ops`.

    Adapters are added to `x W' + b`, before an activation. A residual comes first: `(residual + x W' + b) + adapters`.
    Rows without adapters have the bits of the plain product."""

    def __init__(self, ops: ForwardOps, tables: AdapterTables, routing: Tensor, logit_rows: Tensor | None = None):
        """`routing`, `logit_rows`: those of the step. Without `logit_rows`, a matrix has a row for each one of
        `routing`."""
        self._ops = ops
        self._tables = tables
        self._routing = routing
        self._logit_rows = logit_rows

    def __getattr__(self, operation: str) -> Any:
        return getattr(self._ops, operation)

    def embedding(self, ids: Tensor, weight: Weight | RowTable) -> Tensor:
        y, adapters = self._ops.embedding(ids, weight), self._tables.embeddings.get(id(weight))
        if adapters is not None:
            columns = self._ops.embedding(ids, AdapterRows(adapters, self._routing))
            self._ops.add_adapters_(y, columns, adapters.products, self._routing)
        return y

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        table = self._tables.products.get(id(weight))
        if table is None:
            return self._ops.linear(x, weight, bias, activation, residual)
        if activation is None:
            return self._adapted(x, weight, bias, residual, table)
        y = self._ops.activation(self._adapted(x, weight, bias, None, table), activation)
        return y if residual is None else residual + y

    def linear_glu(self, x: Tensor, weight: Weight, activation: str, bias: Tensor | None = None) -> Tensor:
        table = self._tables.products.get(id(weight))
        if table is None:
            return self._ops.linear_glu(x, weight, activation, bias)
        return self._ops.glu(self._adapted(x, weight, bias, None, table), activation)

    def _adapted(
        self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, table: AdapterTable
    ) -> Tensor:
        y = self._ops.linear(x, weight, bias, None, residual)
        self._ops.add_adapters_(y, x, table, self._routing_of(x))
        return y

    def _routing_of(self, x: Tensor) -> Tensor:
        """The routing of the rows of x, which are those of all tokens, or those whose logits are wanted."""
        if isinstance(x, Tensor) and self._logit_rows is not None and len(x) != len(self._routing):
            return self._routing[self._logit_rows]
        return self._routing
