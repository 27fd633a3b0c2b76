"""How tokens are drawn from rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

EDIT = np.dtype([("token", np.int32), ("factor", np.float32), ("addend", np.float32)])
"""As `LogitEdit` of csrc/include/pace/row_ops.h."""


class Edits:
    """Changes of a few logits of a row, in order: `x = (x < 0 ? x * factor : x / factor) + addend`. An addend of -inf
    bans; tokens that the row does not have are passed over. Grows at the end, and is cut there."""

    __slots__ = ("_records", "_size", "address")

    def __init__(
        self, tokens: Sequence[int] | np.ndarray = (), factor: float = 1.0, addend: Sequence[float] | float = 0.0
    ):
        self._size = len(tokens)
        self._place(np.empty(max(4, self._size), EDIT))
        records = self.records
        records["token"], records["factor"], records["addend"] = tokens, factor, addend

    def _place(self, records: np.ndarray) -> None:
        self._records = records
        self.address: int = records.ctypes.data
        """Address of the first record, until one is added."""

    def __len__(self) -> int:
        return self._size

    @property
    def records(self) -> np.ndarray:
        """`EDIT [len(self)]`, a view."""
        return self._records[: self._size]

    def append(self, token: int, factor: float, addend: float) -> None:
        """Adds an edit at the end, which may move the records."""
        if self._size == len(self._records):
            larger = np.empty(2 * self._size, EDIT)
            larger[: self._size] = self._records
            self._place(larger)
        self._records[self._size] = (token, factor, addend)
        self._size += 1

    def set_addend(self, place: int, addend: float) -> None:
        self._records["addend"][place] = addend

    def truncate(self, size: int) -> None:
        """Forgets all but the first."""
        self._size = size

    def copy(self) -> Edits:
        """The same edits; what either does later does not show in the other."""
        twin = Edits()
        twin._size = self._size
        twin._place(self._records.copy())
        return twin

    def apply_(self, logits: np.ndarray) -> None:
        """Changes `logits [V]` in place, as the op does it. Edits of one token are alike, or there is one."""
        records = self.records[self.records["token"] < len(logits)]
        values = logits[records["token"]]
        with np.errstate(invalid="ignore", over="ignore"):
            values = np.where(values < 0, values * records["factor"], values / records["factor"]) + records["addend"]
        logits[records["token"]] = values


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
    edits: list[list[Edits]] | None = None
    """Changes of each draw's row before it is drawn from, list after list; the rows then differ from each other."""
    masks: Tensor | None = None
    """int32 `[K, ceil(V / 32)]`: bit `i % 32` of word `i // 32` (1 is the lowest) is set where token i may be drawn; bits
    beyond V mean nothing. What a mask bans is -inf, before anything else."""
    mask_rows: Tensor | None = None
    """int64: the mask of each draw; -1 for none. Comes with `masks`."""
    num_top: Tensor | None = None
    """int64: the number of likeliest tokens whose log-probabilities are wanted, with that of the token drawn; -1 for
    none at all. They are those of the row as its mask leaves it, before the edits."""


class Drawn(NamedTuple):
    """What was drawn, M rows; T is the largest `num_top`. Log-probabilities are -inf where they were not wanted."""

    tokens: Tensor
    """int64 `[M]`; -1 where a row, as its mask leaves it, holds NaN or +inf, or nothing above -inf."""
    logprobs: Tensor
    """float32 `[M]`."""
    top_tokens: Tensor
    """int64 `[M, T]`, likeliest first, the lower id first among equals; -1 beyond `num_top`."""
    top_logprobs: Tensor
    """float32 `[M, T]`."""
