"""Ids of tool calls in the formats. Each function takes the name of the tool and the index of the call in its turn."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

IdRule = Callable[[str, int], str]
_LETTERS = string.ascii_letters + string.digits


def call_id(name: str, index: int) -> str:
    """`call_` and 24 letters and digits, as clients expect."""
    return "call_" + _random(24)


def nine_characters(name: str, index: int) -> str:
    """Nine letters and digits, the only form that Mistral's templates accept."""
    return _random(9)


def ten_characters(name: str, index: int) -> str:
    """Ten letters and digits, as Solar-Open writes it."""
    return _random(10)


def numbered(name: str, index: int) -> str:
    """`functions.NAME:INDEX`, as Kimi writes it."""
    return f"functions.{name}:{index}"


def _random(length: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(length))
