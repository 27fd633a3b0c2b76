"""Argument checks shared by the native operations. Each returns what the C++ call needs, or raises an error that says
what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pace.ops.blocks import BlockRows
from pace.ops.pooling import POOLINGS
from pace.ops.weight_layout import QuantizedRows, WeightLayout, layout_of_rows

if TYPE_CHECKING:
    from pace.ops.protocol import Weight


def describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"


def check_rows(name: str, tensor: Tensor) -> tuple[int, int]:
    """Returns `(rows, columns)` of a float32 matrix with contiguous rows."""
    if tensor.dtype != torch.float32 or tensor.ndim != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
        raise ValueError(f"{name} must be a float32 matrix with contiguous rows; got {describe(tensor)}")
    rows, columns = tensor.shape
    return rows, columns


def check_heads(name: str, tensor: Tensor) -> tuple[int, int, int]:
    """Returns `(tokens, heads, head_dim)` of a float32 `[T, H, D]` with contiguous heads. Tokens and heads may be
    strided."""
    if tensor.dtype != torch.float32 or tensor.ndim != 3 or (tensor.stride(2) != 1 and tensor.shape[2] > 1):
        raise ValueError(f"{name} must be float32 [T, H, D] with contiguous D; got {describe(tensor)}")
    tokens, heads, head_dim = tensor.shape
    return tokens, heads, head_dim


def check_vector(name: str, tensor: Tensor, length: int, dtype: torch.dtype = torch.float32) -> int:
    """Returns the address of a contiguous vector of `length` elements of `dtype`."""
    if tensor.dtype != dtype or tensor.ndim != 1 or tensor.shape[0] != length or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous vector of {length} {dtype}; got {describe(tensor)}")
    return tensor.data_ptr()


def check_head_weights(tensor: Tensor, heads: int, head_dim: int) -> int:
    """Returns the address of contiguous float32 `[heads, head_dim]`, or `[head_dim]` for all heads."""
    shapes = (heads, head_dim), (head_dim,)
    if tensor.dtype != torch.float32 or tuple(tensor.shape) not in shapes or not tensor.is_contiguous():
        raise ValueError(
            f"weight must be contiguous float32 [{heads}, {head_dim}] or [{head_dim}]; got {describe(tensor)}"
        )
    return tensor.data_ptr()


def check_pooling(name: str) -> str:
    """Returns the name of a pooling. Raises ValueError for an unknown one."""
    if name not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}; got {name!r}")
    return name


def check_order(order: Tensor, k: int, layout: torch.dtype | WeightLayout | None) -> None:
    """Raises ValueError unless `order` is a valid column permutation for a quantised weight with k columns."""
    if not isinstance(layout, WeightLayout):
        raise ValueError("only quantised weights have an order of columns; permute the columns of others")
    if order.dtype != torch.int64 or order.ndim != 1 or not torch.equal(order.sort().values, torch.arange(k)):
        raise ValueError(f"order must be an int64 permutation of {k} columns; got {describe(order)}")


def check_float_rows(weight: Weight, rows: Tensor, row: int) -> torch.dtype:
    """Returns the dtype in which rows `row ..` of a weight are stored. Raises ValueError unless it is a float dtype."""
    if rows.ndim != 2 or rows.shape[1] != weight.k or row < 0 or row + rows.shape[0] > weight.n:
        raise ValueError(f"cannot write {tuple(rows.shape)} at row {row} of a weight of shape ({weight.n}, {weight.k})")
    layout = layout_of_rows(weight.layout, row, rows.shape[0])
    if isinstance(layout, WeightLayout):
        raise ValueError(f"a weight of {layout} is packed from QuantizedRows, by pack_quantized_; got a tensor")
    return layout


def check_quantized_rows(weight: Weight, rows: QuantizedRows | BlockRows, row: int) -> None:
    """Raises ValueError unless `rows` can become rows `row ..` of a weight."""
    if rows.shape[1] != weight.k or row < 0 or row + rows.shape[0] > weight.n:
        raise ValueError(f"cannot write {rows.shape} at row {row} of a weight of shape ({weight.n}, {weight.k})")
    layout, order = layout_of_rows(weight.layout, row, rows.shape[0]), weight.order
    if rows.layout != layout:
        raise ValueError(f"cannot write rows of {rows.layout} into a weight of {layout}")
    if (order is None) != (rows.order is None) or (order is not None and not torch.equal(order, rows.order)):
        raise ValueError("all rows of a weight have the order of columns that it was made with; these have another one")
