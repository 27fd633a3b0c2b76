"""Elementwise operations on a matrix, and copies of its rows, on the C++ kernels. Activations are float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pace import _C
from pace.ops.checks import check_pooling, check_rows, check_vector


def scale_(x: Tensor, factor: float | Tensor) -> None:
    check_factor(factor, check_rows("x", x)[1])
    if isinstance(factor, Tensor):
        _C.scale(x, 1.0, factor)
    else:
        _C.scale(x, factor)


def check_factor(factor: float | Tensor, columns: int) -> None:
    """Raises ValueError unless a factor is a finite number, or has one for each of `columns`."""
    if isinstance(factor, Tensor):
        check_vector("factor", factor, columns)
    elif not math.isfinite(factor):
        raise ValueError(f"factor must be finite; got {factor}")


def softcap_(x: Tensor, cap: float) -> None:
    if not 0 < cap < math.inf:
        raise ValueError(f"cap must be positive and finite; got {cap}")
    check_rows("x", x)
    _C.softcap(x, cap)


def gate_(x: Tensor, gate: Tensor, activation: str | None = "sigmoid") -> None:
    rows, columns = check_rows("x", x)
    found, gates = check_rows("gate", gate)
    check_gate(columns, gates)
    if found != rows:
        raise ValueError(f"x has {rows} rows, gate has {found}")
    _C.gate(x, gate, activation)


def check_gate(columns: int, gates: int) -> None:
    """Raises ValueError unless each of `gates` columns can be the gate of the same number of columns."""
    if gates < 1 or columns % gates:
        raise ValueError(
            f"gate must be float32 [T, G], where G divides the {columns} columns of x; got {gates} columns"
        )


def given_rows(rows: Tensor) -> Tensor:
    out = torch.empty(check_rows("rows", rows))
    _C.place_rows(out, rows, None, False)
    return out


def concatenate(a: Tensor, b: Tensor) -> Tensor:
    (rows, columns), (others, more) = check_rows("a", a), check_rows("b", b)
    if rows != others:
        raise ValueError(f"a has {rows} rows, b has {others}")
    out = torch.empty(rows, columns + more)
    _C.place_rows(out[:, :columns], a, None, False)
    _C.place_rows(out[:, columns:], b, None, False)
    return out


def pool(x: Tensor, starts: Tensor, pooling: str) -> Tensor:
    columns, count = check_rows("x", x)[1], len(starts) - 1
    check_vector("starts", starts, max(1, count + 1), torch.int32)
    out = torch.empty(count, columns)
    _C.pool(x, check_pooling(pooling), starts, count, out)
    return out


def place_rows_(x: Tensor, rows: Tensor, at: Tensor, add: bool) -> None:
    columns, (count, given) = check_rows("x", x)[1], check_rows("rows", rows)
    if given != columns:
        raise ValueError(f"rows must be float32 [G, {columns}], as wide as x; got {given} columns")
    check_vector("at", at, count, torch.int64)
    _C.place_rows(x, rows, at, add)
