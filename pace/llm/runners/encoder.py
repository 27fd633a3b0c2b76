"""Runs a loaded encoder up to pooled rows or logits, as programs or op by op."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from pace.batch import ForwardBatch
from pace.graph import Program
from pace.llm.adapters.adapted import AdaptedModel
from pace.llm.adapters.slots import AdapterSlots
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.models.encoders.encoder import Encoder, PooledRows
from pace.llm.operators import OPERATORS, OperatorConfig, read_backend
from pace.llm.runners.eager import RoutedOps, TwinsOnPackedWeights, product_operators
from pace.ops import native
from pace.ops.protocol import ForwardOps


class EncoderRunner:
    """A loaded encoder and a way to compute its forward pass. If all operators are native, each kind of result has a
    program, which is recorded on first use. The bits are the same either way."""

    def __init__(
        self,
        encoder: Encoder,
        backend: str | OperatorConfig = "native",
        optimise: bool = True,
        tasks: Sequence[AdapterWeights] = (),
    ):
        """`backend`: as in `LoadOptions`; the encoder was loaded for it. `optimise`: as in `Program`. `tasks`: the
        adapters that texts may have. Raises as `AdapterSlots.load`."""
        self.encoder = encoder
        self._adapters = AdapterSlots(encoder, max(1, len(tasks)), max([task.rank for task in tasks], default=1))
        self.tasks = {task.name: self._load(task) for task in tasks}
        """The slot of the adapter of each task, for `ForwardBatch.routing`."""
        backend = read_backend(backend)
        self._eager = None if backend in ("native", OperatorConfig()) else eager_ops(encoder, backend)
        self._optimise = optimise
        self._programs: dict[tuple[tuple[str, ...] | None, bool], Program] = {}
        self._lock = threading.Lock()

    def pooled(self, batch: ForwardBatch, pooling: tuple[str, ...]) -> Tensor:
        """Returns float32 `[S, P]`: the pooled rows of each text of a step, whose rows of logits are one for each
        text."""
        return self._run(batch, pooling)

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Returns float32 `[S, num_labels]`: the raw logits of the classifier, which must be there."""
        return self._run(batch, None)

    def _load(self, task: AdapterWeights) -> int:
        """Loads an adapter and returns its slot. Equal adapters share one."""
        ((slot, _),) = self._adapters.route(((self._adapters.load(task), 1.0),))
        return slot

    def _run(self, batch: ForwardBatch, pooling: tuple[str, ...] | None) -> Tensor:
        angles, is_adapted = self.encoder.angles(batch), batch.routing is not None
        if self._eager is not None:
            return self._part(pooling, is_adapted).compute(self._eager, batch, angles)
        return self._program(pooling, is_adapted).run(batch, angles)

    def _program(self, pooling: tuple[str, ...] | None, is_adapted: bool) -> Program:
        with self._lock:
            key = pooling, is_adapted
            if key not in self._programs:
                halves = [rotary.half for rotary in self.encoder.rotaries]
                neighbour = next(iter(self._programs.values()), None)
                part = self._part(pooling, is_adapted)
                self._programs[key] = Program(part, self.encoder.caches, halves, self._optimise, neighbour)
            return self._programs[key]

    def _part(self, pooling: tuple[str, ...] | None, is_adapted: bool) -> PooledRows | AdaptedModel:
        """The forward pass. A step without adapters runs that of a model that has none."""
        if pooling is not None:
            part = PooledRows(self.encoder, pooling)
        else:
            head = self.encoder.head
            assert head is not None, "only an encoder with a classifier has logits"
            part = PooledRows(self.encoder, head.pooling, head)
        return AdaptedModel(part, self._adapters.tables) if is_adapted else part


def eager_ops(encoder: Encoder, backend: str | OperatorConfig) -> ForwardOps:
    """The operations for a backend that runs op by op."""
    if not isinstance(backend, OperatorConfig):
        return encoder.ops
    implementations = {"native": native, "torch": TwinsOnPackedWeights()}
    chosen = {operator: implementations[getattr(backend, operator)] for operator in OPERATORS}
    return RoutedOps(chosen, product_operators(encoder))
