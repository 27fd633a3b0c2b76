"""ggml's Q1_0 and Q2_0 in numpy, which the gguf package does not read or write: blocks of bytes, and their values."""

from __future__ import annotations

from enum import IntEnum

import gguf
import numpy as np


class LaterKind(IntEnum):
    """Types of ggml that are missing from the gguf package."""

    Q2_0 = 42


SIZES = {41: (128, 18), 42: (64, 18)}
"""Weights and bytes of a block, by ggml's number."""
gguf.GGML_QUANT_SIZES[LaterKind.Q2_0] = SIZES[42]  # the package's writer looks here


def kind_of(name: str) -> IntEnum:
    return LaterKind[name] if name in LaterKind.__members__ else gguf.GGMLQuantizationType[name]


def quantize(x: np.ndarray, number: int) -> np.ndarray:
    """Blocks uint8 `[..., row bytes]` of float32 `[..., K]`."""
    weights, nbytes = SIZES[number]
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, weights)
    if number == 41:
        scales = np.add.accumulate(np.abs(blocks), axis=-1, dtype=np.float32)[..., -1] / np.float32(weights)
        fields = (blocks >= 0)[..., None]
    else:
        scales = np.abs(blocks).max(-1)
        with np.errstate(divide="ignore"):
            inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0))[..., None]
        exact = blocks * inverse
        codes = (np.trunc(np.abs(exact) + np.float32(0.5)) * np.sign(exact)).astype(np.int32) + 1
        fields = np.stack([codes & 1, codes >> 1], axis=-1)
    bits = np.packbits(fields.astype(np.uint8).reshape(*blocks.shape[:-1], -1), axis=-1, bitorder="little")
    halves = scales.astype(np.float16)[..., None].view(np.uint8)
    return np.concatenate([halves, bits], axis=-1).reshape(*x.shape[:-1], -1)


def dequantize(data: np.ndarray, number: int) -> np.ndarray:
    """float32 `[..., K]` of blocks uint8 `[..., row bytes]`."""
    weights, nbytes = SIZES[number]
    blocks = np.ascontiguousarray(data).reshape(*data.shape[:-1], -1, nbytes)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    fields = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32)
    if number == 41:
        levels = 2 * fields - 1
    else:
        pairs = fields.reshape(*blocks.shape[:-1], weights, 2)
        levels = pairs[..., 0] + 2 * pairs[..., 1] - 1
    with np.errstate(invalid="ignore"):  # 0 times an infinite scale
        return (levels * scales).reshape(*data.shape[:-1], -1)
