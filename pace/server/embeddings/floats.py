"""float32 values for clients: as short decimal numbers, or as base64."""

from __future__ import annotations

import base64

import numpy as np
from torch import Tensor

MAX_DIGITS = 9
"""Decimal digits that tell any two float32 values apart."""
MAX_POWER = 22
"""Largest n for which float64 has 10**n exactly."""


def shortest(values: Tensor) -> np.ndarray:
    """Returns float64 values whose `repr` is the shortest decimal number that reads as the given float32 value.

    A number of few digits is a whole number over a power of ten. Both are exact in float64, so their quotient is the
    float64 nearest to that number. Values whose power would not be exact, below about 1e-13, keep all digits of float64. All must be
    finite.
    """
    exact = values.numpy().astype(np.float64)
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log10(np.abs(exact)))
    found = exact.copy()
    open_ = (exact != 0) & (exponents >= MAX_DIGITS - 1 - MAX_POWER) & (exponents < MAX_DIGITS)
    for digits in range(6, MAX_DIGITS + 1):
        where = np.nonzero(open_)
        if not where[0].size:
            break
        given = exact[where]
        powers = 10.0 ** (digits - 1 - exponents[where])
        short = np.where(powers >= 1, np.rint(given * powers) / powers, given)
        matches = short.astype(np.float32) == given.astype(np.float32)
        kept = tuple(axis[matches] for axis in where)
        found[kept] = short[matches]
        open_[kept] = False
    return found


def as_base64(row: Tensor) -> str:
    """Returns the bytes of a float32 row, little-endian."""
    return base64.b64encode(row.numpy().astype("<f4", copy=False).tobytes()).decode()
