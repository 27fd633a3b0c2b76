"""How tokens are drawn from rows of logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """M tokens to draw, each from a row and by rules of its own; all `[M]`.

    The rules come in the order of the fields. Each leaves at least the likeliest token of those before it."""

    rows: Tensor
    """int64: the rows of logits."""
    temperature: Tensor
    """float32; 1 is off, and 0 takes the largest, as `argmax` does."""
    top_k: Tensor
    """int64: the number of likeliest tokens that stay, with what equals the last of them; 0 is off."""
    top_p: Tensor
    """float32: the mass of the nucleus; 1 is off."""
    min_p: Tensor
    """float32: the share of the likeliest token's probability that the others need; 0 is off."""
    typical_p: Tensor
    """float32: the mass of the tokens whose information is closest to the entropy; 1 is off."""
    uniform: Tensor
    """float64 in [0, 1): the place of the draw in the cumulative probability, in rising order of the ids."""
