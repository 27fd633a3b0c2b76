"""`Program`: a model's forward pass, recorded once and executed by C++ in one call per step (csrc/program.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pace import _C
from pace.graph import instructions as ir
from pace.graph.passes import optimise, plan_buffers
from pace.graph.tracer import SymbolicAngles, SymbolicBatch, Tracer
from pace.ops.native_attention import kv_view
from pace.ops.native_linear import ACTIVATION_CODES

if TYPE_CHECKING:
    from pace.batch import ForwardBatch, KVBlocks

LOGITS = -1
"""The buffer that stands for the result."""


class Recordable(Protocol):
    """What of a model is recorded."""

    def compute(self, ops: Any, batch: Any, angles: Any) -> Any:
        """The forward pass from embedding to logits; looks at its tensors through `ops` alone."""


class Program:
    """`run(batch, angles)` gives the logits that `model.compute(native, batch, angles)` would, bit for bit.

    Recorded for the instruction set in use and for the weights' memory as it is: a model is recorded after it is
    loaded, and kept alive by the program. May be called from several threads, which take turns."""

    def __init__(self, model: Recordable, num_layers: int, angles_half: int):
        """`angles_half`: pairs of each head that the model rotates; 0 for none."""
        self._model = model
        tracer = Tracer()
        angles = SymbolicAngles(angles_half)
        logits = model.compute(tracer, SymbolicBatch(range(num_layers)), (angles, angles))
        self.instructions = optimise(tracer.instructions)
        self._result = logits.value
        self._program = _lower(self.instructions, self._result)
        self._last_cache: tuple[list[KVBlocks] | None, _C.KvCache] = (None, _C.KvCache([]))

    def run(self, batch: ForwardBatch, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Logits `[R, V]` of `batch.logit_rows`; writes the batch's slots of the cache.

        Raises ValueError for ids, slots and spans that do not fit; then nothing is written."""
        kv, cache = self._last_cache  # both at once: another thread may run with a cache of its own
        if batch.kv is not kv:
            cache = _C.KvCache([kv_view(layer)[0] for layer in batch.kv])
            self._last_cache = batch.kv, cache
        cos, sin = (table.data_ptr() for table in angles) if angles else (0, 0)
        spans, num_rows = batch.spans, len(batch.logit_rows)
        logits = torch.empty(num_rows, self._result.columns)
        self._program.run(
            cache,
            len(batch.tokens),
            num_rows,
            batch.tokens.data_ptr(),
            batch.positions.data_ptr(),
            cos,
            sin,
            batch.slots.data_ptr(),
            batch.logit_rows.data_ptr(),
            len(spans.kv_len),
            spans.query_start.data_ptr(),
            spans.kv_len.data_ptr(),
            spans.block_table.data_ptr(),
            spans.block_table.shape[1],
            logits.data_ptr(),
        )
        return logits

    def set_profiling(self, on: bool) -> None:
        """Starts afresh to time every instruction, or stops."""
        self._program.set_profiling(on)

    def timings(self) -> list[tuple[str, int, float]]:
        """(what, runs, seconds over all runs) of every instruction, in order."""
        return self._program.timings()

    @property
    def num_barriers(self) -> int:
        """Of the last step: how often all threads waited for each other."""
        return self._program.barriers

    @property
    def buffer_bytes(self) -> int:
        """Memory for activations, as large as the largest step so far wanted it."""
        return self._program.buffer_bytes


def _lower(instructions: list[ir.Instruction], result: ir.Value) -> _C.Program:
    """The instructions as C++ knows them."""
    plan = plan_buffers(instructions, result)
    program = _C.Program(plan.widths)

    def value(v: ir.Value) -> _C.Value:
        return _C.Value(LOGITS if v is result else plan.number[v], v.columns, v.per_token)

    def heads(h: ir.Heads) -> _C.Heads:
        return _C.Heads(value(h.value), h.column, h.count)

    def norm(parameters: ir.NormParameters | None) -> _C.Norm | None:
        if parameters is None:
            return None
        return _C.Norm(parameters.kind, _address(parameters.weight), _address(parameters.bias), parameters.eps)

    def preparation(p: ir.Preparation) -> _C.Preparation:
        half, interleaved = (p.rotation.half, p.rotation.interleaved) if p.rotation else (0, False)
        return _C.Preparation(norm(p.query_norm), norm(p.key_norm), half, interleaved)

    for instruction in instructions:
        match instruction:
            case ir.Embedding(out, weight, positions, offset):
                program.embedding(value(out), weight.address, weight.order_address, positions, offset)
            case ir.GatherRows(out, x):
                program.gather_rows(value(out), value(x))
            case ir.Add(out, a, b):
                program.add(value(out), value(a), value(b))
            case ir.Norm(out, x, parameters):
                program.norm(value(out), value(x), norm(parameters))
            case ir.Linear(out, x, weight, bias, activation, residual, parameters):
                code, added = ACTIVATION_CODES[activation], None if residual is None else value(residual)
                program.linear(
                    value(out),
                    value(x),
                    norm(parameters),
                    weight.address,
                    weight.order_address,
                    _address(bias),
                    code,
                    added,
                )
            case ir.Attention(out, q, layer, scale, window, softcap, ir.Preparation(k, v) as before):
                program.attention(
                    value(out),
                    heads(q),
                    heads(k),
                    heads(v),
                    preparation(before),
                    layer,
                    scale,
                    window or 0,
                    softcap or 0.0,
                )
            case _:
                raise NotImplementedError(f"a program cannot do {instruction}")
    return program


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
