"""Regular expressions, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PIECE = re.compile(r"\\.|\[|\]", re.DOTALL)


def replace_escapes(pattern: str, outside: Mapping[str, str], within: Mapping[str, str]) -> str:
    r"""A pattern with escapes such as `\s` replaced: by `outside`, or by `within` inside of a class. Others stay."""
    is_class = False

    def replace(match: re.Match[str]) -> str:
        nonlocal is_class
        found = match.group()
        if found in "[]":
            is_class = found == "["
        return (within if is_class else outside).get(found, found)

    return _PIECE.sub(replace, pattern)
