"""Copies the state of objects that follow one sequence's tokens."""

from __future__ import annotations

import copy
from collections import deque
from typing import TypeVar

T = TypeVar("T")

_CONTAINERS = (list, dict, set, bytearray, deque)


def fork_by_copy(original: T) -> T:
    """Returns a shallow copy that also copies lists, dicts, sets, bytearrays and deques among the attributes, but not
    their items."""
    twin = copy.copy(original)
    for name, value in vars(original).items():
        if isinstance(value, _CONTAINERS):
            setattr(twin, name, copy.copy(value))
    return twin
