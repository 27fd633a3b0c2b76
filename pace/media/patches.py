"""Steps that image processors share: resizing, levels of normalised values, and patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


def resize(image: Image, height: int, width: int, resample: int) -> np.ndarray:
    """Pixels uint8 `[height, width, 3]` of an RGB image, resized by Pillow's filter of that number."""
    return np.asarray(image.resize((width, height), resample))


def level_table(scale: float, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Normalised value of each level of each channel, float32 `[3, 256]`.

    `level * scale` is a float64 product rounded to float32. Then come a float32 difference and quotient, as in the PIL
    backend of transformers."""
    levels = (np.arange(256, dtype=np.float64) * scale).astype(np.float32)
    return (levels - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]


def cut_tiles(pixels: np.ndarray, side: int) -> np.ndarray:
    """Square tiles `[N, side, side, 3]` of pixels `[H, W, 3]`, row by row. H and W are multiples of `side`."""
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    return pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)


def normalised(levels: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Values float32 `[N, 3, H, W]` of pixels uint8 `[N, H, W, 3]`, which `table` gives."""
    return np.stack([table[channel][levels[..., channel]] for channel in range(3)], 1)


def make_patches(pixels: np.ndarray, table: np.ndarray, size: int, merge: int, frames: int) -> np.ndarray:
    """Patches float32 `[N, 3 * frames * size * size]` of pixels uint8 `[H, W, 3]`, whose values `table` gives.

    H and W are multiples of `size * merge`. Patches come in blocks of merge x merge, both row by row. The order within
    a patch is channel, frame, row, column; all frames are equal."""
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    blocks = pixels.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
    levels = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, size * size)
    patches = np.empty((rows * columns, 3, frames, size * size), np.float32)
    for channel in range(3):
        patches[:, channel] = table[channel][levels[:, channel]]
    return patches.reshape(rows * columns, -1)


def make_pixel_patches(pixels: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:
    """Patches float32 `[N, size * size * 3]` of pixels uint8 `[H, W, 3]`, whose values `table` gives, row by row. The
    order within a patch is row, column, channel. H and W are multiples of `size`."""
    values = np.stack([table[channel][pixels[..., channel]] for channel in range(3)], -1)
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    blocks = values.reshape(rows, size, columns, size, 3).swapaxes(1, 2)
    return blocks.reshape(rows * columns, size * size * 3)
