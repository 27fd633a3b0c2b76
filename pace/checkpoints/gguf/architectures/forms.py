"""Forms in which GGUF files hold tensors that have other shapes or values on the Hub."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Form(NamedTuple):
    """The difference between a tensor of a file and the Hub's."""

    shape: Callable[[Shape], Shape] = lambda shape: shape
    """The file's shape -> the Hub's, with the same order of elements."""
    values: Callable[[Tensor], Tensor] | None = None
    """The file's values in float64 -> the Hub's; only for vectors and small matrices. The model makes the file's values
    of vectors again, and rounds them to their exact bits."""


AS_IT_IS = Form()
ONE_ROW = Form(lambda shape: (1, *shape) if len(shape) == 1 else shape)
"""A vector that is a matrix of one row on the Hub."""
VECTOR = Form(lambda shape: (prod(shape),))
"""A matrix that is a vector on the Hub."""
FILTERS = Form(lambda shape: (shape[0], 1, shape[1]) if len(shape) == 2 else shape[-3:])
"""Filters of a convolution over channels `[C, L]`, or `[1, C, 1, L]`, which are `[C, 1, L]` on the Hub."""
PLUS_ONE = Form(values=lambda values: values - 1)
"""Weights of norms to which the converter has added 1."""
RATES = Form(VECTOR.shape, lambda values: values.neg().log())
"""Rates of decay `-exp(A)`, in place of the Hub's A."""
POSITIVE_RATES = Form(VECTOR.shape, lambda values: values.log())
"""`exp(A)`, in place of the Hub's A."""
RATES_OF_HEADS = RATES._replace(shape=lambda shape: (1, 1, prod(shape), 1))
"""`RATES` for an A of shape `[1, 1, H, 1]`."""
DIFFERENCES = Form(values=lambda ids: ids - torch.arange(ids.numel()).view(ids.shape))
"""Token ids of logits, which are differences from the logits' numbers on the Hub."""
YES_LESS_NO = Form(
    lambda shape: (1, shape[-1]) if len(shape) == 2 and shape[0] == 2 else shape, lambda x: x[:1] - x[1:]
)
"""Rows of the head for the answers "yes" and "no": a classifier of one label, whose score is that of their softmax."""
