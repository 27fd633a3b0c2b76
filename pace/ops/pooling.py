"""Names of the ways in which the rows of a text become one row."""

from __future__ import annotations

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""sentence-transformers' names, in the order in which it concatenates several."""


def check_pooling(name: str) -> str:
    """Returns the name. Raises ValueError for an unknown one."""
    if name not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}; got {name!r}")
    return name
