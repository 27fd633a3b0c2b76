"""Reads the prompt of a command."""

from __future__ import annotations

import sys


def read_prompt(argument: str | None) -> str:
    """Returns the argument itself, or the text on stdin for `-` (or for None if stdin is not a terminal).

    One newline at the end of stdin is dropped, because `echo` adds it.
    Raises: ValueError if there is no prompt or it is not UTF-8.
    """
    if argument not in (None, "-"):
        return argument
    if argument is None and sys.stdin.isatty():
        raise ValueError("no prompt; give it as an argument, or `-` to read it from stdin")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on stdin is not UTF-8: {error}") from None
    return text.removesuffix("\n").removesuffix("\r")
