"""Runs a loaded encoder up to pooled rows or logits, as programs or op by op."""

from __future__ import annotations

import threading

from torch import Tensor

from pace.batch import ForwardBatch
from pace.graph import Program
from pace.llm.models.encoders.encoder import Encoder, PooledRows
from pace.llm.operators import OPERATORS, OperatorConfig, read_backend
from pace.llm.runners.eager import RoutedOps, TwinsOnPackedWeights, product_operators
from pace.ops import native
from pace.ops.protocol import ForwardOps


class EncoderRunner:
    """A loaded encoder and a way to compute its forward pass. If all operators are native, each kind of result has a
    program, which is recorded on first use. The bits are the same either way."""

    def __init__(self, encoder: Encoder, backend: str | OperatorConfig = "native", optimise: bool = True):
        """`backend`: as in `LoadOptions`; the encoder was loaded for it. `optimise`: as in `Program`."""
        self.encoder = encoder
        backend = read_backend(backend)
        self._eager = None if backend in ("native", OperatorConfig()) else eager_ops(encoder, backend)
        self._optimise = optimise
        self._programs: dict[tuple[str, ...] | None, Program] = {}
        self._lock = threading.Lock()

    def pooled(self, batch: ForwardBatch, pooling: tuple[str, ...]) -> Tensor:
        """Returns float32 `[S, P]`: the pooled rows of each text of a step, whose rows of logits are one for each
        text."""
        return self._run(batch, pooling)

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Returns float32 `[S, num_labels]`: the raw logits of the classifier, which must be there."""
        return self._run(batch, None)

    def _run(self, batch: ForwardBatch, pooling: tuple[str, ...] | None) -> Tensor:
        angles = self.encoder.angles(batch)
        if self._eager is not None:
            return self._part(pooling).compute(self._eager, batch, angles)
        return self._program(pooling).run(batch, angles)

    def _program(self, pooling: tuple[str, ...] | None) -> Program:
        with self._lock:
            if pooling not in self._programs:
                halves = [rotary.half for rotary in self.encoder.rotaries]
                neighbour = next(iter(self._programs.values()), None)
                part = self._part(pooling)
                self._programs[pooling] = Program(part, self.encoder.caches, halves, self._optimise, neighbour)
            return self._programs[pooling]

    def _part(self, pooling: tuple[str, ...] | None) -> PooledRows:
        if pooling is not None:
            return PooledRows(self.encoder, pooling)
        head = self.encoder.head
        assert head is not None, "only an encoder with a classifier has logits"
        return PooledRows(self.encoder, head.pooling, head)


def eager_ops(encoder: Encoder, backend: str | OperatorConfig) -> ForwardOps:
    """The operations for a backend that runs op by op."""
    if not isinstance(backend, OperatorConfig):
        return encoder.ops
    implementations = {"native": native, "torch": TwinsOnPackedWeights()}
    chosen = {operator: implementations[getattr(backend, operator)] for operator in OPERATORS}
    return RoutedOps(chosen, product_operators(encoder))
