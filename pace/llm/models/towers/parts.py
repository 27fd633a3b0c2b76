"""Slices that image towers have in common: patches, blocks, norms and products of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pace.batch import ForwardBatch, Positions
from pace.llm.layers import Block, FloatLinear, LayerNorm, NoNorm, PlainMLP, RMSNorm, TensorSource, UnitNorm
from pace.llm.layers.rotary import Angles
from pace.llm.models.towers.tower import Slice
from pace.ops.experts import Activation
from pace.ops.protocol import ForwardOps

AnyNorm = LayerNorm | RMSNorm | UnitNorm | NoNorm


class PatchEmbedding(Slice):
    """Rows of patches, and rows of positions that are added; without `positions`, only the former. Given rows are both,
    one after the other."""

    def __init__(self, name: str, size: int, patch_shape: tuple[int, ...], bias: bool, positions: bool):
        """`name` is a convolution whose kernel `[size, *patch_shape]` covers a patch."""
        k = math.prod(patch_shape)
        self.matrix = FloatLinear({name: TensorSource((size, *patch_shape), joined=True)}, k, bias)
        self.positions = positions

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        rows, k = batch.given.rows, self.matrix.k
        positions = ops.given_rows(rows[:, k : k + self.matrix.n]) if self.positions else None
        return self.matrix(ops, ops.given_rows(rows[:, :k]), residual=positions)


class VisionBlock(Slice):
    """A block of rows `[T, size]`. A row sees the others of its span: those of an image, of a tile, or of a window."""

    def __init__(
        self, block: Block, size: int, cache: Positions, angle_half: int | None, group: int = 0, num_groups: int = 1
    ):
        """`angle_half`: width of the table of angles; None for a block without a rotation."""
        self.block = block
        self.size = size
        self.group = group
        self.caches = (cache,) * num_groups
        self.angle_halves = () if angle_half is None else (angle_half,)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        kv = batch.kv[self.group]
        return self.block(ops, ops.given_rows(batch.given.rows[:, : self.size]), angles, batch.of_layer(kv), kv)


class RowNorm(Slice):
    """The norm of each row `[T, size]`."""

    def __init__(self, norm: LayerNorm | RMSNorm, size: int):
        self.norm = norm
        self.size = size

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.norm(ops, ops.given_rows(batch.given.rows[:, : self.size]))


class RowLinear(Slice):
    """`matrix(norm(x))` of each row `[T, size]`, in floats."""

    def __init__(self, norm: AnyNorm, target: Mapping[str, int | TensorSource], size: int, bias: bool):
        self.size = size
        self.norm = norm
        self.matrix = FloatLinear(target, size, bias)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.matrix(ops, self.norm(ops, ops.given_rows(batch.given.rows[:, : self.size])))


class RowMLP(Slice):
    """`second(activation(first(norm(x))))` of each row `[T, size]`, in floats."""

    def __init__(
        self,
        norm: AnyNorm,
        first: Mapping[str, int],
        second: Mapping[str, int],
        size: int,
        activation: Activation,
        bias: bool = True,
    ):
        """`first` and `second`: names of the tensors, and their rows."""
        self.size = size
        self.norm = norm
        inner = sum(first.values())
        self.mlp = PlainMLP(FloatLinear(first, size, bias), FloatLinear(second, inner, bias), activation)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.mlp(ops, self.norm(ops, ops.given_rows(batch.given.rows[:, : self.size])))


def cut_patches(pixels: Tensor, size: int) -> Tensor:
    """Patches `[T * rows * columns, C * size * size]` of tiles `[T, C, H, W]`, row by row. Pixels beyond the last whole
    patch are left out."""
    cut = pixels.unfold(2, size, size).unfold(3, size, size)
    return cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, pixels.shape[1] * size * size)


def join_patches(x: Tensor, grid: tuple[int, int, int], side: int) -> Tensor:
    """Joins the rows of side x side neighbouring patches: `[T * rows * columns / side^2, side^2 * size]` of
    `x [T * rows * columns, size]`, both row by row in each tile. Sides of `grid` (T, rows, columns) are multiples."""
    tiles, rows, columns = grid
    blocks = x.view(tiles, rows // side, side, columns // side, side, -1).transpose(2, 3)
    return blocks.reshape(-1, side * side * x.shape[1])


def resized_table(table: Tensor, side: int, rows: int, columns: int, cubic: bool = False) -> Tensor:
    """A table of positions `[side^2, W]`, side x side row by row, resized to `[rows * columns, W]`. Positions are the
    centres of patches. `cubic`: as in `interpolated`."""
    at = [(torch.arange(count).float() + 0.5) * side / count - 0.5 for count in (rows, columns)]
    return interpolated(table, side, at[0].repeat_interleave(columns), at[1].repeat(rows), cubic)


def interpolated(table: Tensor, side: int, rows: Tensor, columns: Tensor, cubic: bool = False) -> Tensor:
    """Rows `[N, W]` of a table `[side^2, W]`, side x side row by row, between whole positions: at `rows` and `columns`,
    float32 `[N]`. It is a weighted sum of the 2 x 2 nearest rows, or of 4 x 4 if `cubic` (Keys, a = -0.75). A position
    beyond the table is that at its edge."""
    found = torch.zeros(len(rows), table.shape[1])
    for row, of_row in _taps(rows, side, cubic):
        for column, of_column in _taps(columns, side, cubic):
            found += table[row * side + column] * (of_row * of_column)[:, None]
    return found


def _taps(at: Tensor, side: int, cubic: bool) -> list[tuple[Tensor, Tensor]]:
    """Indices of the neighbours of each position, and their weights."""
    low = at.floor()
    part = at - low
    if cubic:
        weights = {-1: _far(1 + part), 0: _near(part), 1: _near(1 - part), 2: _far(2 - part)}
    else:
        weights = {0: 1 - part, 1: part}
    return [((low.long() + offset).clamp(0, side - 1), weight) for offset, weight in weights.items()]


def _near(distance: Tensor) -> Tensor:
    """The cubic kernel at distances up to 1."""
    return (1.25 * distance - 2.25) * distance * distance + 1


def _far(distance: Tensor) -> Tensor:
    """The cubic kernel at distances of 1 to 2."""
    return ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
