"""How messages show values."""

from __future__ import annotations

from typing import Any


def shown(value: Any) -> str:
    """A value as it may appear in a message: its repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
