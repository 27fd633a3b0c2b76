"""How messages speak of arguments and values: an argument has its name in Python, or what a user of the command line
types for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Naming = Callable[[str, bool | None], str | None]
"""`(name, flag) -> text`: as for `argument`, or None for the name in Python."""

_naming: Naming = lambda name, flag: None


def argument(name: str, flag: bool | None = None) -> str:
    """An argument, or one set to a flag, as the reader of a message has to write it: `act_order` and `act_order=False`,
    or `--act-order` and `--no-act-order`. A value may follow as `=value` in either case."""
    return _naming(name, flag) or (name if flag is None else f"{name}={flag}")


@contextmanager
def arguments_named_by(naming: Naming) -> Iterator[None]:
    """Messages that are made in the block, by any thread, name arguments so."""
    global _naming
    before, _naming = _naming, naming
    try:
        yield
    finally:
        _naming = before


def shown(value: Any) -> str:
    """A value as it may appear in a message: its repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
