"""Maps rows of checkpoint tensors to rows of weights.

A tensor may hold the rows of one matrix or of several. Examples are all experts, queries, keys and values head by head,
and alternating rows of gate and up. It may also hold them as columns. `RowRange` selects rows of a tensor.
`TensorSource` locates a part of a matrix in a tensor. `WeightTarget` is the destination of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pace.ops.blocks import BlockRows
from pace.ops.weight_layout import QuantizedRows


@dataclass(frozen=True)
class RowRange:
    """`count` rows of a tensor: runs of `run` adjacent rows, the first at row `first`, and a new run every `step` rows.
    Row r is row `first + r // run * step + r % run` of the tensor.

    `RowRange(e * n, n)`: matrix e of a stack [E, n, K].
    `RowRange(1, n, step=2)`: every other row, such as up of [gate, up, gate, up, ...].
    `RowRange(D, heads * D, D, 3 * D)`: the keys of heads stored as [query, key, value] of D rows each."""

    first: int
    count: int
    run: int = 1
    step: int = 1

    def __post_init__(self) -> None:
        if min(self.first, self.count) < 0 or not 1 <= self.run <= self.step:
            raise ValueError(f"runs must be of 1 to `step` rows that exist; got {self}")

    def before(self, row: int) -> int:
        """Number of selected rows before a row of the tensor."""
        whole, rest = divmod(max(0, row - self.first), self.step)
        return min(self.count, whole * self.run + min(rest, self.run))

    def indices(self, first: int, last: int) -> Tensor:
        """int64: indices in the tensor of the selected rows `first .. last`."""
        r = torch.arange(first, last)
        return self.first + r // self.run * self.step + r % self.run


Piece = Tensor | QuantizedRows | BlockRows
"""Rows of a tensor: a matrix, or elements of a vector."""


@dataclass(frozen=True)
class WeightTarget:
    """Destination of rows of one checkpoint tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor. All its dimensions but the last are flattened to rows; for a vector's target, all of
    them to elements."""
    fill: Callable[[Piece, int], None]
    """`fill(rows, start)` copies rows `start ..` of the selected rows, in float32, float16 or bfloat16; rows of a
    matrix may be quantised. Different rows and targets may be filled from several threads. Only after
    `Layer.allocate`."""
    rows: RowRange | None = None
    """The rows that belong here; None for all."""
    transposed: bool = False
    """True if the tensor is `[..., K, n]`: its rows here are the n columns of each matrix."""
    is_vector: bool = False
    joined: bool = False
    """True if all dimensions of the tensor but the first are one row, as in a convolution over patches."""
    is_copy: bool = False
    """True if another layer holds the same rows."""
    is_flat: bool = False
    """True if the file has a stack of matrices as one matrix, one below the other."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        return (math.prod(self.shape[:-1]), self.shape[-1]) if self.is_flat else self.shape

    @property
    def num_rows(self) -> int:
        """Number of rows of the tensor."""
        if self.joined:
            return self.shape[0]
        if self.is_vector:
            return math.prod(self.shape)
        return math.prod(self.shape[:-1]) if not self.transposed else math.prod(self.shape[:-2]) * self.shape[-1]

    @property
    def is_turned(self) -> bool:
        """True if a row here is not a row of the tensor."""
        return self.transposed or self.joined

    @property
    def is_plain(self) -> bool:
        """True if the tensor is used as it is."""
        return self.rows is None and not self.is_turned

    def offer(self, piece: Piece, start: int) -> None:
        """Fills in the rows that belong here, from rows `start ..` of the tensor. For a transposed tensor, these are
        its columns, and for a joined one, rows of all other dimensions."""
        if self.is_vector and piece.ndim != 1:
            piece, start = piece.flatten(), start * math.prod(piece.shape[1:])
        if self.rows is None:
            return self.fill(piece, start)
        first, last = self.rows.before(start), self.rows.before(start + piece.shape[0])
        if first < last:
            self.fill(take(piece, self.rows.indices(first, last) - start), first)


def take(piece: Piece, indices: Tensor) -> Piece:
    """Selects rows of a piece, in ascending order; a view if they are adjacent."""
    first, last = int(indices[0]), int(indices[-1]) + 1
    chosen = slice(first, last) if last - first == len(indices) else indices
    return piece[chosen] if isinstance(piece, Tensor) else piece.take(chosen)


@dataclass(frozen=True)
class TensorSource:
    """Location of the rows of a part of a matrix `[n, K]`, if the part is not a whole tensor."""

    shape: tuple[int, ...]
    """Shape of the tensor, `[..., R, K]`; transposed `[..., K, R]`. Its rows are counted over all matrices."""
    rows: tuple[RowRange, ...] = ()
    """Rows of the part, top down; empty for the whole tensor."""
    tensor: str | None = None
    """Name of the tensor; None for the part's name with ".weight"."""
    bias: str | None = None
    """Name of the tensor with an element for each row; None for the part's name with ".bias"."""
    transposed: bool = False
    joined: bool = False
    is_flat: bool = False
    """True if the file has a stack of matrices as one matrix, one below the other."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the part."""
        if self.joined:
            return self.shape[0]
        if self.rows:
            return sum(rows.count for rows in self.rows)
        return math.prod(self.shape[:-2]) * self.shape[-1 if self.transposed else -2]

    def of_bias(self) -> TensorSource:
        """The same rows of the biases, `[..., R]`."""
        lead = (*self.shape[:-2], self.shape[-1]) if self.transposed else self.shape[: 1 if self.joined else -1]
        return TensorSource(lead, self.rows, self.bias)

    def targets(self, fill: Callable[[Piece, int], None], row: int, is_vector: bool = False) -> list[WeightTarget]:
        """Makes a target for each of `rows`. They fill rows `row ..` of a weight by `fill(rows, start)`."""
        found = []
        for rows in self.rows or (None,):
            found.append(
                WeightTarget(
                    self.shape,
                    lambda piece, start, row=row: fill(piece, row + start),
                    rows,
                    self.transposed,
                    is_vector,
                    self.joined and not is_vector,
                    is_flat=self.is_flat and not is_vector,
                )
            )
            row += 0 if rows is None else rows.count
        return found


def check_targets(name: str, targets: list[WeightTarget]) -> None:
    """Raises ValueError unless the targets of a tensor agree on its shape, and each of its rows goes to exactly one of
    them. Copies are not counted."""
    shapes = {(target.shape, target.transposed, target.num_rows, target.is_flat) for target in targets}
    if len(shapes) > 1:
        raise ValueError(f"two layers claim the tensor {name!r}, as different things: {sorted(shapes)}")
    targets = [target for target in targets if not target.is_copy]
    if len(targets) == 1 and targets[0].rows is None:
        return
    claims = torch.zeros(targets[0].num_rows, dtype=torch.int32)
    for target in targets:
        rows = target.rows or RowRange(0, target.num_rows)
        indices = rows.indices(0, rows.count)
        if rows.count and int(indices[-1]) >= len(claims):
            raise ValueError(f"{rows} of the tensor {name!r} are wanted, which has {len(claims)} rows")
        claims[indices] += 1
    if (claims > 1).any():
        raise ValueError(
            f"two layers claim the tensor {name!r}, the first time at row {int((claims > 1).int().argmax())}"
        )
    if (claims == 0).any():
        raise ValueError(f"no layer claims row {int((claims == 0).int().argmax())} of the tensor {name!r}")
