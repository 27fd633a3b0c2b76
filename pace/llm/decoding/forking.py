"""A second object in the same state, for what follows the tokens of one sequence."""

from __future__ import annotations

import copy
from collections import deque
from typing import TypeVar

T = TypeVar("T")

_CONTAINERS = (list, dict, set, bytearray, deque)


def fork_by_copy(original: T) -> T:
    """A shallow copy, in which lists, dicts, sets, bytearrays and deques that are attributes are copied as well, but
    not what they hold."""
    twin = copy.copy(original)
    for name, value in vars(original).items():
        if isinstance(value, _CONTAINERS):
            setattr(twin, name, copy.copy(value))
    return twin
