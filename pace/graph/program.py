"""`Program`: a model's forward pass, recorded once and executed with one call per step (csrc/program_run.cpp)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pace import _C
from pace.graph import recorded
from pace.graph.instructions import Instruction, Places, Value
from pace.graph.passes import fuse, plan_buffers
from pace.graph.recorded.products import Linear
from pace.graph.recorded.rows import ReadRows
from pace.graph.symbols import Recording, SymbolicAngles
from pace.memory import ReusedPages, format_bytes
from pace.ops.kernels.attention import kv_view
from pace.ops.kernels.states import check_slots
from pace.states import StateSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pace.batch import ForwardBatch, KVBlocks, LayerBlocks, LayerCache

OWN_PAGES_BYTES = 8 << 20
"""Minimum size of logits that get their own pages, reused by later steps; in the heap, they would leave holes of that
size."""


class Recordable(Protocol):
    """A model, or a part of a tower, that is recorded."""

    def compute(self, ops: Any, batch: Any, angles: Any) -> Any:
        """The forward pass, from embedding or given rows to logits or rows. Uses its tensors only through `ops`."""


class Program:
    """A recorded forward pass: `run(batch, angles)` returns the result of `model.compute(native, batch, angles)`, bit
    for bit. This is logits, or a row of floats for each token.

    It holds for the current instruction set and memory of the weights, so a model is recorded after loading. The
    program keeps the model alive. Thread-safe; concurrent calls take turns."""

    def __init__(
        self,
        model: Recordable,
        layers: Sequence[LayerCache],
        angle_halves: Sequence[int],
        optimise: bool = True,
        neighbour: Program | None = None,
    ):
        """`layers`: those of the model's `KVSpec`. `angle_halves`: the pairs of a head that each table of angles
        rotates. Without `optimise`, every instruction is a single operation: the same bits, with more barriers.
        `neighbour`: a program with which it shares the memory of activations."""
        self._model = model
        recording = Recording()
        angles = tuple((SymbolicAngles(half, table),) * 2 for table, half in enumerate(angle_halves))
        logits = model.compute(recorded, recording.batch(layers), angles)
        if not logits.columns.is_whole:
            raise NotImplementedError("a recorded forward pass ends in a whole matrix, not in some columns of one")
        self._result = logits.columns.value
        self.instructions = fuse(recording.instructions, self._result) if optimise else recording.instructions
        last = self.instructions[-1]
        self._may_find_largest = (
            isinstance(last, Linear)
            and last.out is self._result
            and not self._result.per_token
            and last.adapters is None
        )
        self._inputs = [each for each in self.instructions if isinstance(each, ReadRows)]
        self._program = _lower(self.instructions, self._result, neighbour and neighbour._program)
        self._last_cache: tuple[list[LayerBlocks] | None, _C.KvCache] = (None, _C.KvCache([]))
        self._last_batch: tuple[Callable[[], ForwardBatch | None], _C.Batch | None] = (lambda: None, None)
        """A weak reference: given rows may be large."""
        self._pages = ReusedPages()

    def run(
        self, batch: ForwardBatch, angles: tuple[tuple[Tensor, Tensor], ...], finds_largest: bool = False
    ) -> Tensor:
        """Returns logits `[R, V]` of `batch.logit_rows`, or rows `[T, W]`; writes the batch's slots of the cache. With
        `finds_largest`, also writes `batch.largest` if the program ends in a product and the step has few logit rows.

        Raises ValueError for ids, slots, spans and given rows that do not fit, before anything is written."""
        kv, cache = self._last_cache  # read both at once: another thread may run with another cache
        if batch.kv is not kv:
            cache = _C.KvCache([_view(layer) for layer in batch.kv if layer is not None])
            self._last_cache = batch.kv, cache
        tables = [(cos.data_ptr(), sin.data_ptr()) for cos, sin in angles]
        inputs = [each.read(batch) for each in self._inputs]
        last, arrays = self._last_batch
        if batch is not last():
            arrays = _C.Batch(batch)
            self._last_batch = weakref.ref(batch), arrays
        logits = self._empty_result(arrays.num_tokens if self._result.per_token else arrays.num_logit_rows)
        addresses = [rows.data_ptr() for rows in inputs]
        finds_largest = finds_largest and self._may_find_largest
        self._program.run(cache, arrays, tables, addresses, logits.data_ptr(), finds_largest)
        return logits

    def _empty_result(self, rows: int) -> Tensor:
        """Returns fp32 `[rows, V]` with undefined contents. Raises MemoryError."""
        columns = self._result.columns
        num_bytes = rows * columns * torch.float32.itemsize
        if num_bytes < OWN_PAGES_BYTES:
            return torch.empty(rows, columns)
        try:
            memory = self._pages.take(num_bytes)
        except OSError as error:
            raise MemoryError(
                f"{rows} rows of logits take {format_bytes(num_bytes)}: {error.strerror}; score fewer texts at once, "
                "or give the process more memory"
            ) from None
        return torch.frombuffer(memory, dtype=torch.float32, count=rows * columns).view(rows, columns)

    def release(self) -> None:
        """Drops the references to the cache of the last step."""
        self._last_cache = (None, _C.KvCache([]))

    def set_profiling(self, on: bool) -> None:
        """Starts timing every instruction from zero, or stops."""
        self._program.set_profiling(on)

    def timings(self) -> list[tuple[str, int, float]]:
        """Returns (description, runs, seconds over all runs) of every instruction, in order."""
        return self._program.timings()

    @property
    def num_barriers(self) -> int:
        """Number of barriers in the last step, at which all threads wait for each other."""
        return self._program.barriers

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory for activations, sized for the largest step so far."""
        return self._program.buffer_bytes


def _view(layer: KVBlocks | StateSlots) -> tuple[_C.KvView, int] | StateSlots:
    """The C++ view of a layer's blocks and the index of its group, or the layer's slots."""
    if isinstance(layer, StateSlots):
        check_slots(layer)
        return layer
    return kv_view(layer), layer.group


def _lower(instructions: list[Instruction], result: Value, neighbour: _C.Program | None) -> _C.Program:
    """Converts the instructions to a C++ program."""
    plan = plan_buffers(instructions, result)
    program, places = _C.Program(plan.widths, neighbour), Places(plan.number, result)
    for instruction in instructions:
        instruction.lower(program, places)
    return program
