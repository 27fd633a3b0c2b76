"""Checks that the native operations share: each returns what the C++ call needs, or raises an error that says what was wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"


def check_rows(name: str, tensor: Tensor) -> tuple[int, int]:
    """`(rows, columns)` of a float32 matrix whose rows are contiguous."""
    if tensor.dtype != torch.float32 or tensor.ndim != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
        raise ValueError(f"{name} must be a float32 matrix with contiguous rows; got {describe(tensor)}")
    rows, columns = tensor.shape
    return rows, columns


def check_heads(name: str, tensor: Tensor) -> tuple[int, int, int]:
    """`(tokens, heads, head_dim)` of a float32 `[T, H, D]` whose heads are contiguous; tokens and heads may be strided."""
    if tensor.dtype != torch.float32 or tensor.ndim != 3 or (tensor.stride(2) != 1 and tensor.shape[2] > 1):
        raise ValueError(f"{name} must be float32 [T, H, D] with contiguous D; got {describe(tensor)}")
    tokens, heads, head_dim = tensor.shape
    return tokens, heads, head_dim


def check_vector(name: str, tensor: Tensor, length: int, dtype: torch.dtype = torch.float32) -> int:
    """The address of a contiguous vector of `length` elements of `dtype`."""
    if tensor.dtype != dtype or tensor.ndim != 1 or tensor.shape[0] != length or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous vector of {length} {dtype}; got {describe(tensor)}")
    return tensor.data_ptr()


def check_same_shape(name: str, tensor: Tensor, other: Tensor) -> int:
    """The address of a contiguous float32 tensor of the shape of `other`."""
    if tensor.dtype != torch.float32 or tensor.shape != other.shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous float32 of shape {tuple(other.shape)}; got {describe(tensor)}")
    return tensor.data_ptr()
