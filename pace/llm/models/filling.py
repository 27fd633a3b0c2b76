"""Slots filled from a checkpoint in pieces of bounded size: each piece is read once, wherever its rows go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Protocol

import torch
from torch import Tensor

from pace.checkpoints.reader import PIECE_BYTES
from pace.llm.layers import Slot
from pace.llm.layers.slot import Piece
from pace.ops.weight_layout import WeightLayout

LEAST_BAND_BYTES = 1024
"""Of a row, in a band of columns: a page of the file is read this often at most, a page over this."""


class TensorReader(Protocol):
    """A checkpoint, as `load_weights` sees it. A matrix that it holds quantised, in whatever tensors, is one tensor
    `{module}.weight` here, whose dtype is a WeightLayout.

    Rows of a tensor are those of all dimensions but the last, one after the other; of a vector, its elements."""

    tensors: Mapping[str, tuple[torch.dtype | WeightLayout, tuple[int, ...]]]
    """Name -> (dtype, shape) of every tensor."""

    @property
    def files(self) -> list[Path]:
        """Those that hold the tensors."""

    def column_order(self, name: str) -> Tensor | None:
        """`QuantizedRows.order` of a quantised tensor's rows; asked for those alone, before any is read."""

    def row_ranges(self, name: str) -> list[tuple[int, int]]:
        """Ranges [start, stop) that cover the rows of a tensor in pieces of bounded size; one range for a vector."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Piece:
        """Rows [start, stop) of a tensor, of its dtype; may be a view of mapped memory. Called from several threads,
        and again after `release`."""

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """The rows just read are no longer needed."""


def fill_slots(
    reader: TensorReader, slots: Mapping[str, list[Slot]], workers: int, progress: Callable[[int], object]
) -> None:
    """Fills the slots of tensors, `workers` pieces at a time; `progress` is told the bytes of each piece. After an error
    no further piece is begun, and the error is raised."""
    pieces = (fill for name in slots for fill in fillings(reader, name, slots[name]))
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


def fillings(reader: TensorReader, name: str, slots: list[Slot]) -> Iterator[Callable[[], int]]:
    """Calls that together fill the slots of a tensor, in any order and from several threads; each returns the bytes
    that it took care of."""
    if not slots[0].transposed:
        for start, stop in reader.row_ranges(name):
            yield partial(_fill_rows, reader, name, slots, start, stop)
        return
    dtype, (*stack, k, n) = reader.tensors[name]
    least = LEAST_BAND_BYTES // dtype.itemsize
    width = max(least, PIECE_BYTES // max(1, k * dtype.itemsize) // 16 * 16)
    for matrix in range(math.prod(stack)):
        for first in range(0, n, width):
            yield partial(_fill_columns, reader, name, slots, matrix, range(first, min(n, first + width)))


def _fill_rows(reader: TensorReader, name: str, slots: list[Slot], start: int, stop: int) -> int:
    piece = reader.read(name, start, stop)
    for slot in slots:
        slot.offer(piece, start)
    num_bytes = piece.nbytes
    del piece
    reader.release(name, start, stop)
    return num_bytes


def _fill_columns(reader: TensorReader, name: str, slots: list[Slot], matrix: int, columns: range) -> int:
    """A band of columns of one matrix `[K, n]` of a stack, turned while its rows are read piece by piece."""
    dtype, (*_, k, n) = reader.tensors[name]
    turned = torch.empty(len(columns), k, dtype=dtype)
    step = max(1, PIECE_BYTES // max(1, n * dtype.itemsize))
    for top in range(0, k, step):
        rows = matrix * k + top, matrix * k + min(k, top + step)
        turned[:, top : top + step] = reader.read(name, *rows)[:, columns.start : columns.stop].t()
        reader.release(name, *rows)
    for slot in slots:
        slot.offer(turned, matrix * n + columns.start)
    return turned.nbytes
