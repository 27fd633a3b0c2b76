"""Runs a loaded model op by op, each operator by its chosen implementation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pace.batch import ForwardBatch
from pace.graph.recorded import OPERATOR_OF
from pace.llm.layers import AddedVector, Embedding, Layer, Linear, TiedLMHead
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.towers.tower import Slice
from pace.llm.operators import OPERATORS, OperatorConfig, OperatorReport, OperatorRun
from pace.llm.runners.runner import ModelRunner
from pace.ops import native, reference
from pace.ops.adapters import AdapterTable
from pace.ops.weight import PackedWeight


class EagerRunner(ModelRunner):
    """Runs each operation as one call from Python, counted and timed."""

    def __init__(self, model: BaseModelForCausalLM, config: OperatorConfig | None = None):
        """With `config`, the model must be loaded with `pace.ops.native`. Without, all operators run on the ops that it
        was loaded with."""
        super().__init__(model)
        implementations = {"native": native, "torch": TwinsOnPackedWeights()}
        chosen = {
            operator: implementations[getattr(config, operator)] if config else model.ops for operator in OPERATORS
        }
        self._ops = RoutedOps(chosen, product_operators(model))

    def forward(self, batch: ForwardBatch) -> Tensor:
        ops = self.adapted(self._ops, batch.routing, batch.logit_rows)
        return self.model.compute(ops, batch, self.model.angles(batch))

    def final_rows(self, batch: ForwardBatch) -> Tensor:
        ops = self.adapted(self._ops, batch.routing, batch.logit_rows)
        return self.model.final_rows(ops, batch, self.model.angles(batch))

    def logits(self, rows: Tensor, routing: Tensor | None = None) -> Tensor:
        return self.model.logits(self.adapted(self._ops, routing), rows)

    def run_slice(self, piece: Slice, batch: ForwardBatch, angles: Angles) -> Tensor:
        return piece.compute(self._ops, batch, angles)

    def operator_report(self) -> OperatorReport:
        return OperatorReport("op by op", self._ops.runs())


class RoutedOps:
    """`ForwardOps` that pass each call to the implementation of its operator, and count and time it."""

    def __init__(self, implementations: Mapping[str, Any], product_operators: Mapping[int, str]):
        """`implementations`: operator -> object with the functions of `ForwardOps`; `product_operators`: result of
        `product_operators()`."""
        self._totals: dict[tuple[str, str], list] = {}
        for operation, operator in OPERATOR_OF.items():
            functions = {name: getattr(chosen, operation) for name, chosen in implementations.items()}
            setattr(
                self,
                operation,
                self._routed(operator, functions[operator])
                if operator
                else self._routed_by_weight(functions, product_operators),
            )

    def _routed(self, operator: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arguments: Any, **more: Any) -> Any:
            return self._run(operator, function, *arguments, **more)

        return call

    def _routed_by_weight(self, functions: Mapping[str, Callable], product_operators: Mapping[int, str]) -> Callable:
        @functools.wraps(next(iter(functions.values())))
        def call(x: Tensor, weight: Any, *arguments: Any, **more: Any) -> Tensor:
            operator = product_operators[id(weight)]
            return self._run(operator, functions[operator], x, weight, *arguments, **more)

        return call

    def _run(self, operator: str, function: Callable, *arguments: Any, **more: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments, **more)
        seconds = time.perf_counter() - started
        # Reads the implementation off the function that ran, so that the report does not repeat a mistake of the
        # routing.
        implementation = "torch" if function.__module__.startswith(reference.__name__) else "native"
        total = self._totals.setdefault((operator, implementation), [0, 0.0])
        total[0] += 1
        total[1] += seconds
        return result

    def runs(self) -> list[OperatorRun]:
        found = [OperatorRun(*names, calls, seconds) for names, (calls, seconds) in list(self._totals.items())]
        return sorted(found, key=lambda run: (OPERATORS.index(run.operator), run.implementation))


class TwinsOnPackedWeights:
    """Functions of `pace.ops.reference` for models with packed weights. A weight is unpacked for one call. The call
    needs memory for the unpacked matrix and its float32 copy: 6 bytes for each element of a bf16 weight."""

    def __getattr__(self, operation: str) -> Callable:
        twin = getattr(reference, operation)

        @functools.wraps(twin)
        def on_packed(*arguments: Any, **more: Any) -> Any:
            return twin(*map(_dense, arguments), **{name: _dense(value) for name, value in more.items()})

        setattr(self, operation, on_packed)
        return on_packed


def _dense(argument: Any) -> Any:
    if isinstance(argument, PackedWeight):
        return reference.DenseWeight(native.unpack(argument), argument.glu)
    if isinstance(argument, AdapterTable):
        return argument.converted(_dense)
    if isinstance(argument, native.ExpertStack):
        return reference.DenseStack([_dense(expert) for expert in argument.experts])
    return argument


def product_operators(model: BaseModelForCausalLM) -> dict[int, str]:
    """id of each weight of a loaded model -> the operator of its products, set by the innermost enclosing layer that
    names one."""
    operators: dict[int, str] = {}

    def visit(layer: Layer, operator: str) -> None:
        operator = layer.operator or operator
        if isinstance(layer, TiedLMHead):
            operators[id(layer.embedding.weight)] = operator
        elif isinstance(layer, (Linear, AddedVector)) and not isinstance(layer, Embedding):
            operators[id(layer.weight)] = operator
        for child in layer.children():
            visit(child, operator)

    visit(model, "projection")
    return operators
