"""From what a user typed to what a model reads."""

from __future__ import annotations

import sys


def read_prompt(argument: str | None) -> str:
    """The prompt: the argument itself, or with `-` (or none at all, from a pipe) what stands on stdin.

    One newline at the end of stdin is dropped: `echo` adds it, nobody means it.
    Raises: ValueError where there is no prompt or it is not UTF-8.
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
