"""Rows of a matrix in ggml's blocks, as GGUF files hold them. The kernels pack them as they are
(csrc/ops/ggml_blocks.cpp)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pace import _C
from pace.ops.weight_layout import CODES, SUPER_BLOCK, QuantizedRows, WeightLayout


@dataclass(frozen=True)
class BlockType:
    """A type of ggml: a row is a sequence of such blocks. Its struct is in ggml/src/ggml-common.h."""

    number: int
    """ggml's, in the headers of files and for the kernels."""
    name: str
    weights: int
    """Weights of a block."""
    nbytes: int
    """Bytes of a block."""
    layout: WeightLayout
    """Holds the same numbers in as many bits."""

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k weights; ValueError where these are no whole blocks."""
        if k % self.weights:
            raise ValueError(f"rows of {k} weights are no whole number of {self.name} blocks of {self.weights}")
        return k // self.weights * self.nbytes


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows of a quantised matrix as a file has them. Used like `QuantizedRows`, which `unpack` makes of them."""

    type: BlockType
    data: Tensor
    """uint8 `[rows, row_bytes]`, contiguous rows; may be a view of mapped memory."""
    name: str = "the matrix"
    """What errors call it."""

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
        """Some of the rows; a view where `rows` is a slice."""
        return replace(self, data=self.data[rows])

    def unpack(self) -> QuantizedRows:
        """The same rows, a byte for each code."""
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
        """float32 `[rows, K]`. Raises ValueError for scales that are NaN or infinite."""
        rows = self.unpack()
        for values in rows.group_scales():
            if values is not None and not values.isfinite().all():
                raise self._not_finite()
        return rows.dequantize()

    def pack(self, weight: int, row: int) -> None:
        """Writes them as logical rows from `row` on of the packed weight at an address. Raises ValueError as
        `dequantize`."""
        if not _C.pack_blocks(weight, row, self.shape[0], self.type.number, *self._source):
            raise self._not_finite()

    @property
    def _source(self) -> tuple[int, int]:
        """Address, and bytes between rows."""
        if self.data.stride(1) != 1 and self.data.shape[1] > 1:
            raise ValueError(f"rows of blocks must be contiguous; got strides {self.data.stride()}")
        return self.data.data_ptr(), self.data.stride(0)

    def _not_finite(self) -> ValueError:
        return ValueError(f"{self.name} has scales that are NaN or infinite: the file is damaged")
