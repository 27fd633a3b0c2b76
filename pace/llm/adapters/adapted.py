"""A model's forward pass with adapters: the model's own code, on operations that add them to its products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import Recordable
from pace.ops.adapters import AdapterTable
from pace.ops.experts import Activation
from pace.ops.protocol import ForwardOps, Weight


class AdaptedModel:
    """The forward pass of a model, or of a stage of it, whose rows have the adapters of `batch.routing`."""

    def __init__(self, model: Recordable, tables: Mapping[int, AdapterTable]):
        """`tables`: as `AdapterSlots.tables`."""
        self.model = model
        self.tables = tables

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.model.compute(AdaptedOps(ops, self.tables, batch.routing, batch.logit_rows), batch, angles)


class AdaptedOps:
    """`ForwardOps` whose products have adapters. All other operations are those of `ops`.

    Adapters are added to `x W' + b`, before an activation. A residual comes first: `(residual + x W' + b) + adapters`.
    Rows without adapters have the bits of the plain product."""

    def __init__(
        self, ops: ForwardOps, tables: Mapping[int, AdapterTable], routing: Tensor, logit_rows: Tensor | None = None
    ):
        """`routing`, `logit_rows`: those of the step. Without `logit_rows`, a matrix has a row for each one of
        `routing`."""
        self._ops = ops
        self._tables = tables
        self._routing = routing
        self._logit_rows = logit_rows

    def __getattr__(self, operation: str) -> Any:
        return getattr(self._ops, operation)

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        table = self._tables.get(id(weight))
        if table is None:
            return self._ops.linear(x, weight, bias, activation, residual)
        if activation is None:
            return self._adapted(x, weight, bias, residual, table)
        y = self._ops.activation(self._adapted(x, weight, bias, None, table), activation)
        return y if residual is None else residual + y

    def linear_glu(self, x: Tensor, weight: Weight, activation: str, bias: Tensor | None = None) -> Tensor:
        table = self._tables.get(id(weight))
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
