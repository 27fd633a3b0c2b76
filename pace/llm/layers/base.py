"""Base classes of layers: a tree that declares its tensors first, and gets memory only once a checkpoint fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from pace.llm.layers.weight_target import TensorSource, WeightTarget
from pace.ops.protocol import WeightOps

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes of weights that are not quantised."""


class Layer:
    """A node of the model: either a leaf that owns weights (and overrides `targets`, `allocate`, `nbytes`), or composed
    of other layers.

    Constructing a layer takes no memory. It declares its tensors (`targets`): a checkpoint can be checked before
    `allocate`. Layers are immutable once filled and may be called from several threads."""

    operator: ClassVar[str | None] = None
    """The operator (pace/llm/operators.py) of the matrix products of this layer and of those below; None for the
    parent's."""

    def children(self) -> Iterator[Layer]:
        """Yields the layers held as attributes, or in lists that are attributes, in the order of assignment."""
        for value in vars(self).values():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Layer):
                    yield item

    def walk(self) -> Iterator[Layer]:
        """Yields this layer and all below."""
        yield self
        for child in self.children():
            yield from child.walk()

    def targets(self) -> dict[str, list[WeightTarget]]:
        """Checkpoint name -> targets of its rows, in this layer and all below. `check_targets` raises if two claim the
        same row."""
        targets: dict[str, list[WeightTarget]] = {}
        for child in self.children():
            for name, found in child.targets().items():
                targets.setdefault(name, []).extend(found)
        return targets

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        """Adapts `targets` to a checkpoint with tensors of these names and shapes, where it may have several forms.
        Before `allocate`."""
        for child in self.children():
            child.choose(tensors)

    def norm_readers(self) -> list[tuple[Layer, list[Layer]]]:
        """Returns, for a decoder layer, the norms whose output only certain matrix products read, with those products.
        A channel of such a norm can be scaled, and the products' columns divided by the same factor, without changing
        the model (pace/calibrate)."""
        return []

    def allocate(self, ops: WeightOps, dtype: torch.dtype) -> None:
        """Allocates all weights: matrices in `dtype`, or quantised, in the storage of `ops`; vectors in float32
        (float64 for a float64 model)."""
        for child in self.children():
            child.allocate(ops, dtype)

    def planned_nbytes(self, ops: WeightOps, dtype: torch.dtype) -> int:
        """The value of `nbytes` after `allocate(ops, dtype)`."""
        return sum(child.planned_nbytes(ops, dtype) for child in self.children())

    @property
    def nbytes(self) -> int:
        """Bytes of all weights below, each counted once; 0 before `allocate`."""
        return sum(child.nbytes for child in self.children())

    @property
    def num_weights(self) -> int:
        """Elements of all weights below, each counted once, loaded or not."""
        return sum(child.num_weights for child in self.children())

    def matrices(self) -> Iterator[Layer]:
        """Yields the leaves that own a matrix."""
        for child in self.children():
            yield from child.matrices()

    def stacks(self) -> Iterator[Layer]:
        """Yields the layers whose matrices are stored together in one layout."""
        for child in self.children():
            yield from child.stacks()

    def tables(self) -> Iterator[Layer]:
        """Yields the leaves whose matrix stays in the checkpoint's file."""
        for child in self.children():
            yield from child.tables()


class Vectors(Layer):
    """Named vectors of a leaf: biases, and the weights of norms. Stored in float32, independent of the dtype of
    matrices."""

    def __init__(
        self,
        lengths: dict[str, int],
        sources: Mapping[str, TensorSource] = {},
        offset: float = 0.0,
        num_zeros: int = 0,
    ):
        """`lengths`: checkpoint name -> length; the vectors are concatenated in this order. `sources`: locations of
        vectors that are part of another tensor. `offset` is added to the checkpoint's values. `num_zeros`: number of
        zeros after the last vector, unless there is none."""
        self.lengths = lengths
        self.sources = sources
        self.offset = offset
        self.num_zeros = num_zeros
        self.values: Tensor | None = None

    def targets(self) -> dict[str, list[WeightTarget]]:
        targets: dict[str, list[WeightTarget]] = {}
        start = 0
        for name, length in self.lengths.items():
            source = self.sources.get(name) or TensorSource((length,))
            targets.setdefault(self.tensor(name), []).extend(source.targets(self._fill, start, is_vector=True))
            start += length
        return targets

    def tensor(self, name: str) -> str:
        """The name of the tensor that holds a vector."""
        return (name in self.sources and self.sources[name].tensor) or name

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and vectors with the checkpoint's values."""
        start = 0
        for name, length in self.lengths.items():
            yield name, self.to_file(self.values[start : start + length])
            start += length

    def from_file(self, values: Tensor) -> Tensor:
        """Returns the model's values for some of the checkpoint's."""
        return values.double() + self.offset if self.offset else values

    def to_file(self, values: Tensor) -> Tensor:
        """Returns the checkpoint's values for some of the model's."""
        return values - self.offset if self.offset else values

    def allocate(self, ops: WeightOps, dtype: torch.dtype) -> None:
        if self.lengths:
            self.values = torch.zeros(self._size, dtype=torch.promote_types(dtype, torch.float32))

    def planned_nbytes(self, ops: WeightOps, dtype: torch.dtype) -> int:
        return self._size * torch.promote_types(dtype, torch.float32).itemsize

    @property
    def _size(self) -> int:
        """Elements of `values`."""
        return self.num_weights + self.num_zeros if self.lengths else 0

    @property
    def num_weights(self) -> int:
        return sum(self.lengths.values())

    def _fill(self, source: Tensor, start: int) -> None:
        self.values[start : start + len(source)] = self.from_file(source)

    @property
    def nbytes(self) -> int:
        return 0 if self.values is None else self.values.nbytes


class ScaledVectors(Vectors):
    """Vectors of the checkpoint times factors, such as one for each part of a vector."""

    def __init__(
        self, lengths: dict[str, int], factors: Sequence[tuple[int, float]], sources: Mapping[str, TensorSource] = {}
    ):
        """`factors`: pairs of a number of elements and their factor, from the first element of the first vector on."""
        super().__init__(lengths, sources)
        self.factors = factors

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        factors = self._factors().split(list(self.lengths.values()))
        for (name, part), of_part in zip(super().stored(), factors, strict=True):
            yield name, part / of_part

    def _fill(self, source: Tensor, start: int) -> None:
        end = start + len(source)
        self.values[start:end] = source.double() * self._factors()[start:end]

    def _factors(self) -> Tensor:
        """Returns the factor of each element, float64."""
        counts, factors = zip(*self.factors)
        return torch.tensor(factors, dtype=torch.float64).repeat_interleave(torch.tensor(counts))
