"""Tools for regular expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PIECE = re.compile(r"\\.|\[|\]", re.DOTALL)


def replace_escapes(pattern: str, outside: Mapping[str, str], within: Mapping[str, str]) -> str:
    r"""Replaces escapes such as `\s`: by `within` inside of a class, by `outside` elsewhere. Other escapes are kept."""
    is_class = False

    def replace(match: re.Match[str]) -> str:
        nonlocal is_class
        found = match.group()
        if found in "[]":
            is_class = found == "["
        return (within if is_class else outside).get(found, found)

    return _PIECE.sub(replace, pattern)
