"""Vectors of pooled rows: Dense layers, the first dimensions, length 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pace.checkpoints.reader import CheckpointReader
from pace.llm.encoding.settings import AfterPooling, DenseSettings
from pace.llm.layers import FloatLinear, Layer
from pace.llm.layers.base import FLOAT_DTYPES
from pace.llm.loading.fill import fill_targets
from pace.naming import counted, shown
from pace.ops.protocol import Ops

LEAST_LENGTH = 1e-12
"""Rows that are shorter are divided by this, about as in sentence-transformers."""


class Dense(Layer):
    """`activation(x W' + b)`, plus x or its projection with a residual. Weights and sums are float32."""

    def __init__(self, sizes: tuple[int, int], bias: bool, activation: str | None, residual: bool):
        """`sizes`: floats of a row in and out."""
        k, n = sizes
        self.linear = FloatLinear({"linear": n}, k, bias)
        self.activation = activation
        self.residual = residual
        self.projection = FloatLinear({"residual": n}, k) if residual and n != k else None

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        residual = self.projection(ops, x) if self.projection else x if self.residual else None
        return self.linear(ops, x, self.activation, residual)

    @property
    def size(self) -> int:
        """Floats of a row that comes out."""
        return self.linear.n


class Finish:
    """Makes vectors of pooled rows. Every row has the same bits alone and among others."""

    def __init__(self, ops: Ops, pooled_size: int, layers: Sequence[Dense | None], default_size: int | None = None):
        """`layers`: None divides rows by their length. `default_size`: dimensions of a vector without a wish; None for
        all."""
        self._ops = ops
        self._layers = list(layers)
        sizes = [layer.size for layer in self._layers if layer is not None]
        self.size = sizes[-1] if sizes else pooled_size
        """Largest number of dimensions of a vector."""
        self.default_size = min(default_size or self.size, self.size)
        self.normalises = bool(self._layers) and self._layers[-1] is None

    def __call__(self, rows: Tensor, dimensions: int | None = None, normalise: bool | None = None) -> Tensor:
        """Returns float32 `[N, dimensions]` of pooled rows. `normalise`: None for what the layers say."""
        wanted = self.normalises if normalise is None else normalise
        for layer in self._layers[:-1] if self.normalises else self._layers:
            rows = unit_rows(self._ops, rows) if layer is None else layer(self._ops, rows)
        if self.normalises and wanted:  # the cut comes after this, and a small row loses bits
            rows = unit_rows(self._ops, rows)
        size = dimensions or self.default_size
        if size < rows.shape[1]:
            rows = rows[:, :size].contiguous()
        elif self.normalises or not wanted:
            return rows
        return unit_rows(self._ops, rows) if wanted else rows


def unit_rows(ops: Ops, x: Tensor) -> Tensor:
    """Returns the rows of `x [N, K]` divided by their length, or by about LEAST_LENGTH if that is more."""
    size = x.shape[1]
    if not x.shape[0]:
        return x
    return ops.rms_norm(x, torch.full((size,), size**-0.5), LEAST_LENGTH**2 / size)


def make_layers(ops: Ops, pooled_size: int, after: Sequence[AfterPooling]) -> list[Dense | None]:
    """Makes the layers after pooling, with their weights. Raises ValueError if sizes do not fit, or tensors, and the
    errors of `CheckpointReader`."""
    layers: list[Dense | None] = []
    size = pooled_size
    for settings in after:
        if not isinstance(settings, DenseSettings):
            layers.append(None)
            continue
        if settings.in_features != size:
            raise ValueError(
                f"{settings.folder}/config.json: in_features is {settings.in_features}, but the rows before have {size}"
            )
        layers.append(_load_dense(ops, settings))
        size = settings.out_features
    return layers


def dense_of(ops: Ops, weight: Tensor) -> Dense:
    """Makes a Dense without bias, activation and residual of a matrix `[out, in]`."""
    n, k = weight.shape
    dense = Dense((k, n), False, None, False)
    dense.allocate(ops, torch.float32)
    dense.targets()["linear.weight"][0].offer(weight, 0)
    return dense


def _load_dense(ops: Ops, settings: DenseSettings) -> Dense:
    sizes = (settings.in_features, settings.out_features)
    dense = Dense(sizes, settings.bias, settings.activation, settings.residual)
    targets = dense.targets()
    with CheckpointReader(settings.folder) as reader:
        missing, others = targets.keys() - reader.tensors.keys(), reader.tensors.keys() - targets.keys()
        if missing or others:
            raise ValueError(
                f"{settings.folder}: its config.json asks for {counted(len(targets), 'tensor')} "
                f"({', '.join(sorted(targets))}), but the file has {shown(', '.join(sorted(reader.tensors)))}"
            )
        for name, (target, *_) in targets.items():
            dtype, shape = reader.tensors[name]
            if tuple(shape) != target.shape or dtype not in FLOAT_DTYPES:
                raise ValueError(
                    f"{settings.folder}: {name} is {dtype} {list(shape)}, its config.json demands floats "
                    f"{list(target.shape)}"
                )
        dense.allocate(ops, torch.float32)
        fill_targets(reader, targets, 1, lambda num_bytes: None)
    return dense
