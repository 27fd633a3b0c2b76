"""Fills weights from a checkpoint in pieces of bounded size. Each piece is read once, and all its rows are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from pace.checkpoints.files import Version
from pace.checkpoints.reader import PIECE_BYTES
from pace.llm.layers import WeightTarget
from pace.llm.layers.weight_target import Piece
from pace.llm.loading.memory import check_memory
from pace.llm.loading.plan import plan_layout
from pace.ops.blocks import BlockRows
from pace.ops.file_table import FileTable
from pace.ops.protocol import WeightOps
from pace.ops.weight_layout import WeightLayout

if TYPE_CHECKING:
    from pace.llm.models.model import Model

MIN_BAND_BYTES = 1024
"""Minimum bytes of a row in a band of columns. It limits how often a page of the file is read: at most the page size
divided by this."""

FAULT_AROUND_BYTES = 64 << 10
"""Where a page of a file is read, Linux maps others around it that are in memory (fault_around_bytes)."""


class TensorReader(Protocol):
    """A checkpoint's interface for `load_weights`. A quantised matrix, stored in any tensors, appears as one tensor
    `{module}.weight` whose dtype is a WeightLayout.

    All dimensions of a tensor but the last are flattened to rows; rows of a vector are its elements."""

    tensors: Mapping[str, tuple[torch.dtype | WeightLayout, tuple[int, ...]]]
    """Name -> (dtype, shape) of every tensor."""

    @property
    def files(self) -> dict[Path, Version]:
        """The files that hold the tensors, as they were when they were opened."""

    def column_order(self, name: str) -> Tensor | None:
        """`QuantizedRows.order` of a quantised tensor's rows. Only called for quantised tensors, before any is read."""

    def row_ranges(self, name: str) -> list[tuple[int, int]]:
        """Ranges [start, stop) that split the rows of a tensor into pieces of bounded size; one range for a vector."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Piece:
        """Returns rows [start, stop) of a tensor in its dtype; may be a view of mapped memory. Called from several
        threads, and again after `release`."""

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Called when the rows just read are no longer needed."""

    def keep(self, name: str) -> None:
        """Lets single rows of a tensor be read at any time, also after the files are closed."""


def load_weights(model: Model, reader: TensorReader, workers: int, progress: Callable[[int], object]) -> None:
    """Fills every weight of a model from a checkpoint, `workers` pieces at a time; `progress` is called with the bytes
    of each piece.

    At most `workers` pieces (`reader.row_ranges`) are in memory at once, plus the packed weights. Nothing is allocated
    before every name and shape is checked. Raises one ValueError that lists all tensors that are missing, unexpected or
    of a wrong shape. Raises MemoryError if they do not fit into memory, and with `weights_file`, the errors of its
    `choose` and `map`."""
    fill(model, reader, *plan_layout(model, reader), workers, progress)


def fill(
    model: Model,
    reader: TensorReader,
    names: Mapping[str, str],
    targets: Mapping[str, list[WeightTarget]],
    workers: int,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """The part of `load_weights` after `plan_layout`, which returns `names` and `targets`. Tensors without a target are
    ignored."""
    in_file = model.weights_file.choose(model) if model.weights_file else []
    check_memory(model)

    def fill_tensors(tensors: Container[str]) -> None:
        some = {name: targets[here] for name, here in names.items() if here in targets and here in tensors}
        fill_targets(reader, some, workers, progress)

    filled = model.weights_file.map(reader.files, in_file, model.dtype, fill_tensors) if model.weights_file else set()
    sources = {here: name for name, here in names.items()}
    for table in model.tables():
        table.table = open_table(model.ops, reader, sources[table.name])
        filled = filled | {table.name}
    model.allocate(model.ops, model.dtype)
    fill_tensors(targets.keys() - filled)


def open_table(ops: WeightOps, reader: TensorReader, name: str) -> FileTable:
    """Makes the table of a tensor that stays in its file. Memory of a row's pages is given back after each lookup, so
    the table never becomes resident."""
    dtype, (n, k) = reader.tensors[name]
    is_coded = isinstance(dtype, WeightLayout)
    size = ops.weight_nbytes(n, k, dtype) if is_coded else n * k * dtype.itemsize
    around = FAULT_AROUND_BYTES * n // size + 1
    reader.keep(name)

    def read(rows: list[int], out: Tensor) -> None:
        blocks: BlockRows | None = None
        for index, row in enumerate(rows):
            piece = reader.read(name, row, row + 1)
            if not isinstance(piece, BlockRows):
                out[index] = piece if isinstance(piece, Tensor) else piece.dequantize()
            else:
                blocks = blocks or replace(piece, data=piece.data.new_empty(len(rows), piece.data.shape[1]))
                blocks.data[index] = piece.data[0]
            reader.release(name, max(0, row - around), min(n, row + around + 1))
        if blocks is not None:
            out.copy_(blocks.dequantize())

    return FileTable(n, k, size, torch.float32 if is_coded else torch.promote_types(dtype, torch.float32), read)


def fill_targets(
    reader: TensorReader, targets: Mapping[str, list[WeightTarget]], workers: int, progress: Callable[[int], object]
) -> None:
    """Fills the targets of tensors, `workers` pieces at a time; `progress` is called with the bytes of each piece.
    After an error no other piece is started, and the error is raised."""
    pieces = (fill for name in targets for fill in fillings(reader, name, targets[name]))
    lock, stopped = Lock(), Event()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                fill = next(pieces, None)
            if fill is None:
                return
            try:
                progress(fill())
            except BaseException:
                stopped.set()
                raise

    if workers == 1:
        work()
        return
    with ThreadPoolExecutor(workers) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(workers)]:
                worker.result()
        finally:
            stopped.set()


def fillings(reader: TensorReader, name: str, targets: list[WeightTarget]) -> Iterator[Callable[[], int]]:
    """Yields calls that together fill the targets of a tensor, in any order and from several threads. Each returns the
    bytes that it read."""
    if targets[0].joined:
        count, *rest = reader.tensors[name][1]
        step = max(1, PIECE_BYTES // (math.prod(rest) * reader.tensors[name][0].itemsize))
        for start in range(0, count, step):
            yield partial(_fill_joined, reader, name, targets, start, min(count, start + step))
        return
    if not targets[0].transposed:
        for start, stop in reader.row_ranges(name):
            yield partial(_fill_rows, reader, name, targets, start, stop)
        return
    dtype, (*stack, k, n) = reader.tensors[name][0], targets[0].shape
    least = MIN_BAND_BYTES // dtype.itemsize
    width = max(least, PIECE_BYTES // max(1, k * dtype.itemsize) // 16 * 16)
    for matrix in range(math.prod(stack)):
        for first in range(0, n, width):
            yield partial(_fill_columns, reader, name, targets, matrix, k, range(first, min(n, first + width)))


def _fill_rows(reader: TensorReader, name: str, targets: list[WeightTarget], start: int, stop: int) -> int:
    piece = reader.read(name, start, stop)
    for target in targets:
        target.offer(piece, start)
    num_bytes = piece.nbytes
    del piece
    reader.release(name, start, stop)
    return num_bytes


def _fill_joined(reader: TensorReader, name: str, targets: list[WeightTarget], start: int, stop: int) -> int:
    """Fills rows that are rows `start .. stop` of the tensor's first dimension."""
    height = math.prod(reader.tensors[name][1][1:-1])
    piece = reader.read(name, start * height, stop * height)
    for target in targets:
        target.offer(piece.reshape(stop - start, -1), start)
    num_bytes = piece.nbytes
    del piece
    reader.release(name, start * height, stop * height)
    return num_bytes


def _fill_columns(
    reader: TensorReader, name: str, targets: list[WeightTarget], matrix: int, k: int, columns: range
) -> int:
    """Transposes a band of columns of one matrix `[k, n]` of a stack, while its rows are read in pieces."""
    dtype, n = reader.tensors[name][0], targets[0].shape[-1]
    turned = torch.empty(len(columns), k, dtype=dtype)
    step = max(1, PIECE_BYTES // max(1, n * dtype.itemsize))
    for top in range(0, k, step):
        rows = matrix * k + top, matrix * k + min(k, top + step)
        turned[:, top : top + step] = reader.read(name, *rows)[:, columns.start : columns.stop].t()
        reader.release(name, *rows)
    for target in targets:
        target.offer(turned, matrix * n + columns.start)
    return turned.nbytes
