"""Rows of a matrix in ggml's blocks, as stored in GGUF files. The kernels pack them directly
(csrc/ops/ggml_blocks.cpp)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pace import _C
from pace.ops.weight_layout import CODES, SUPER_BLOCK, QuantizedRows, WeightLayout


@dataclass(frozen=True)
class BlockType:
    """A ggml block type: a row is a sequence of such blocks. Its struct is in ggml/src/ggml-common.h."""

    number: int
    """ggml's number of the type, used in file headers and by the kernels."""
    name: str
    weights: int
    """Number of weights in a block."""
    nbytes: int
    """Bytes of a block."""
    layout: WeightLayout
    """The layout that stores the same numbers in the same number of bits."""

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k weights. Raises ValueError unless k is a multiple of the block."""
        if k % self.weights:
            raise ValueError(f"rows of {k} weights are no whole number of {self.name} blocks of {self.weights}")
        return k // self.weights * self.nbytes


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows of a quantised matrix in a file's format. Has the interface of `QuantizedRows`; `unpack` converts to it."""

    type: BlockType
    data: Tensor
    """uint8 `[rows, row_bytes]`, contiguous rows; may be a view of mapped memory."""
    name: str = "the matrix"
    """Name of the matrix in error messages."""

    order = None

    @property
    def layout(self) -> WeightLayout:
        return self.type.layout

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1] // self.type.nbytes * self.type.weights

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def take(self, rows: slice | Tensor) -> BlockRows:
        """Returns some of the rows; a view if `rows` is a slice."""
        return replace(self, data=self.data[rows])

    def unpack(self) -> QuantizedRows:
        """Returns the same rows as `QuantizedRows`, with one byte for each code."""
        (num_rows, k), layout = self.shape, self.layout
        in_blocks = layout.in_super_blocks
        codes = torch.empty(num_rows, k, dtype=CODES[layout.code])
        scales = torch.empty(num_rows, layout.num_groups(k), dtype=torch.int8 if in_blocks else torch.float32)
        mins = torch.empty_like(scales) if layout.has_mins else None
        super_scales = torch.empty(num_rows, k // SUPER_BLOCK, dtype=torch.float16) if in_blocks else None
        super_mins = torch.empty_like(super_scales) if in_blocks and layout.has_mins else None
        addresses = [0 if part is None else part.data_ptr() for part in (scales, mins, super_scales, super_mins)]
        _C.unpack_blocks(self.type.number, *self._source, num_rows, k, codes.data_ptr(), *addresses)
        return QuantizedRows(layout, codes, scales, mins, super_scales=super_scales, super_mins=super_mins)

    def dequantize(self) -> Tensor:
        """Returns float32 `[rows, K]`. Raises ValueError for scales that are NaN or infinite."""
        rows = self.unpack()
        for values in rows.group_scales():
            if values is not None and not values.isfinite().all():
                raise self._not_finite()
        return rows.dequantize()

    def pack(self, weight: int, row: int) -> None:
        """Packs the rows into the weight at address `weight`, from logical row `row` on. Raises ValueError as
        `dequantize`."""
        if not _C.pack_blocks(weight, row, self.shape[0], self.type.number, *self._source):
            raise self._not_finite()

    @property
    def _source(self) -> tuple[int, int]:
        """Address of the first row, and the bytes between rows."""
        if self.data.stride(1) != 1 and self.data.shape[1] > 1:
            raise ValueError(f"rows of blocks must be contiguous; got strides {self.data.stride()}")
        return self.data.data_ptr(), self.data.stride(0)

    def _not_finite(self) -> ValueError:
        return ValueError(f"{self.name} has scales that are NaN or infinite: the file is damaged")
