"""How messages speak of arguments and values. Arguments have their names in Python; the command line says options
instead (pace/cli/options_in_messages.py)."""

from __future__ import annotations

from typing import Any


def argument(name: str, flag: bool | None = None) -> str:
    """An argument, or one set to a flag, as messages have it: `act_order`, `act_order=False`. A value may follow the
    former as `=value`."""
    return name if flag is None else f"{name}={flag}"


def shown(value: Any) -> str:
    """A value as it may appear in a message: its repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
