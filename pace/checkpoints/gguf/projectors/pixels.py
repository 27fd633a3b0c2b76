"""Weights of patches whose elements are ordered by pixels on the Hub, and by channels in a file."""

from __future__ import annotations

from math import isqrt, prod

from torch import Tensor

from pace.checkpoints.gguf.architectures.forms import Form

CHANNELS = 3


def by_pixels(values: Tensor) -> Tensor:
    """Orders elements `[..., channels, rows, columns]` as `[..., rows, columns, channels]`."""
    return values.movedim(-3, -1)


def of_flat_patches(values: Tensor) -> Tensor:
    """The same for the last dimension, which has all elements of a square patch."""
    side = isqrt(values.shape[-1] // CHANNELS)
    return by_pixels(values.unflatten(-1, (CHANNELS, side, side))).flatten(-3)


ROWS_OF_PIXELS = Form(lambda shape: (shape[0], prod(shape[1:])), by_pixels)
"""A convolution `[hidden, channels, rows, columns]` that is a matrix `[hidden, pixels * channels]` on the Hub."""
FLAT_PATCHES = Form(values=of_flat_patches)
"""A matrix or vector over the elements of a patch."""
