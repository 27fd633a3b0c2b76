"""Arguments and results of drawing tokens from rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_type_hints

import numpy as np
from torch import Tensor

from pace.ops.rules import Rules

EDIT = np.dtype([("token", np.int32), ("factor", np.float32), ("addend", np.float32)])
"""The layout of `LogitEdit` in csrc/include/pace/row_ops.h."""


class Edits:
    """Edits of a few logits of a row, in order: `x = (x < 0 ? x * factor : x / factor) + addend`. An addend of -inf
    bans the token; tokens beyond the row are skipped. Edits are only appended or removed at the end."""

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
        """Address of the first record. Invalid after `append`."""

    def __len__(self) -> int:
        return self._size

    @property
    def records(self) -> np.ndarray:
        """View of the records, `EDIT [len(self)]`."""
        return self._records[: self._size]

    def append(self, token: int, factor: float, addend: float) -> None:
        """Appends an edit, which may move the records."""
        if self._size == len(self._records):
            larger = np.empty(2 * self._size, EDIT)
            larger[: self._size] = self._records
            self._place(larger)
        self._records[self._size] = (token, factor, addend)
        self._size += 1

    def set_addend(self, place: int, addend: float) -> None:
        self._records["addend"][place] = addend

    def truncate(self, size: int) -> None:
        """Removes all but the first `size` edits."""
        self._size = size

    def copy(self) -> Edits:
        """Returns an independent copy."""
        copied = Edits()
        copied._size = self._size
        copied._place(self._records.copy())
        return copied

    def apply_(self, logits: np.ndarray) -> None:
        """Applies the edits to `logits [V]` in place, like the op. All edits of one token must be equal."""
        records = self.records[self.records["token"] < len(logits)]
        values = logits[records["token"]]
        with np.errstate(invalid="ignore", over="ignore"):
            values = np.where(values < 0, values * records["factor"], values / records["factor"]) + records["addend"]
        logits[records["token"]] = values


_DTYPES = {int: np.int64, float: np.float32}
RULES_DTYPE = np.dtype([(name, _DTYPES[kind]) for name, kind in get_type_hints(Rules).items()], align=True)
"""The layout of `SampleRules` in csrc/ops/sample.cpp."""


@dataclass(frozen=True)
class Draws:
    """M tokens to draw, each from its own row and with its own rules; all fields are `[M]`."""

    rows: Tensor
    """int64: the row of logits for each draw."""
    rules: np.ndarray
    """`RULES_DTYPE`."""
    uniform: Tensor
    """float64 in [0, 1): position of the draw in the cumulative probability, in ascending order of token ids."""
    edits: list[list[Edits]] | None = None
    """Edits of each draw's row before drawing; each draw has a list of `Edits`. The rows must then all differ."""
    masks: Tensor | None = None
    """int32 `[K, ceil(V / 32)]`: bit `i % 32` of word `i // 32` (1 is the lowest) is set if token i is allowed; bits
    beyond V are ignored. Banned tokens become -inf before everything else."""
    mask_rows: Tensor | None = None
    """int64: index of each draw's mask; -1 for none. Required with `masks`."""
    num_top: Tensor | None = None
    """int64: number of most likely tokens whose log-probabilities are returned, with that of the drawn token; -1 for no
    log-probabilities. They are those of the row after its mask and before the edits."""


class Drawn(NamedTuple):
    """Result of M draws; T is the largest `num_top`. Log-probabilities are -inf where not requested."""

    tokens: Tensor
    """int64 `[M]`; -1 if the row, after its mask, holds NaN or +inf, or nothing above -inf."""
    logprobs: Tensor
    """float32 `[M]`."""
    top_tokens: Tensor
    """int64 `[M, T]`, most likely first; among equals the lower id first. -1 beyond `num_top`."""
    top_logprobs: Tensor
    """float32 `[M, T]`."""
