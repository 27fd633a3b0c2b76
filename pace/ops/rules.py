"""Rules of a draw, in a module that imports neither numpy nor torch: the command line reads them before it loads."""

from __future__ import annotations

from typing import NamedTuple


class Rules(NamedTuple):
    """Rules of one draw, with the values that turn them off: the fields of `SamplingConfig` with these names. They are
    applied in this order. Each leaves at least the most likely token of those that remain."""

    temperature: float = 1.0
    """0 takes the largest logit, like `argmax`."""
    top_k: int = 0
    """Number of most likely tokens to keep, plus those equal to the last of them."""
    top_p: float = 1.0
    """Mass of the nucleus."""
    min_p: float = 0.0
    """Minimum probability of a token, as a share of the most likely token's."""
    typical_p: float = 1.0
    """Mass of the tokens whose information is closest to the entropy."""
