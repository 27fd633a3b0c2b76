"""float32 values for clients: as short decimal numbers, or as base64."""

from __future__ import annotations

import base64

import numpy as np
from torch import Tensor

DIGITS = range(6, 10)
"""Decimal digits: float32 keeps any number of 6, and 9 distinguish any two values of float32."""
POWERS = np.array([float(f"1e{exponent}") for exponent in range(23)])
"""Powers of ten that float64 has exactly."""


def shortest(values: Tensor) -> np.ndarray:
    """Returns float64 values whose `repr` is the shortest decimal number that reads as the given float32 value.

    A number of few digits is a whole number over a power of ten. Both are exact in float64, so their quotient is the
    float64 nearest to that number. Values beyond 1e-13 to 1e6 keep all digits of float64. All must be finite.
    """
    found = values.numpy().astype(np.float64)
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log10(np.abs(found)))
    is_open = (exponents > DIGITS[-1] - len(POWERS)) & (exponents < DIGITS[0])
    for digits in DIGITS:
        where = np.nonzero(is_open)
        given = found[where]
        powers = POWERS[digits - 1 - exponents[where].astype(int)]
        short = np.rint(given * powers) / powers
        matches = short.astype(np.float32) == given.astype(np.float32)
        kept = tuple(axis[matches] for axis in where)
        found[kept] = short[matches]
        is_open[kept] = False
    return found


def as_base64(row: Tensor) -> str:
    """Returns the bytes of a float32 row, little-endian."""
    return base64.b64encode(row.numpy().astype("<f4", copy=False).tobytes()).decode()
