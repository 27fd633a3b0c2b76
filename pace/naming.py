"""Values, lists and suggestions of names in error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

MAX_LISTED = 40
"""Names in a list."""


def shown(value: Any) -> str:
    """The repr of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def meant(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: "; did you mean 'top_k'?", or "." if no known name is similar."""
    known = list(known)
    near = [longer for longer in known if longer.startswith(name)] or difflib.get_close_matches(
        name.lower(), known, n=1
    )
    return f"; did you mean {near[0]!r}?" if near else "."


def listed(names: Iterable[str]) -> str:
    """The first of the names, and the number of the others: a wrong config.json can cause thousands."""
    names = list(names)
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def one_line(error: BaseException) -> str:
    """An exception of another library."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def dtype_name(dtype: object) -> str:
    """The name of a torch.dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def counted(number: int, noun: str) -> str:
    """A number and its noun, such as "1 token" or "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def check_text(text: str, name: str = "the prompt") -> None:
    """Raises ValueError for text that is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid text: it holds half a character, a lone surrogate, at {error.start}"
        ) from None
