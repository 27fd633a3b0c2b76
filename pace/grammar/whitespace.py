"""Whitespace between the parts of a JSON text: names, regular expressions, and the resulting options of llguidance."""

from __future__ import annotations

import re
from typing import Any

from pace.grammar.backend import repeats_whitespace
from pace.grammar.patterns import replace_escapes

FLEXIBLE = r" |\n{1,2}[ \t]{0,20}"
"""Whitespace as in llama.cpp (its rule `space`). Models lay JSON out as they learned it, but cannot generate blanks for
ever."""
_COMPACT = {"whitespace_flexible": False}
_NAMES = ("flexible", "compact", "spaced")

_SEPARATORS = {"item": ",", "key": ":"}
_MAX_CHARACTERS = 200
_BLANK = r" |\t|\n|\r|\\[tnr]|\\x20|\\x09|\\x0[aAdD]|\\u0020|\\u0009|\\u000[aAdD]"
_PATTERN = re.compile(rf"(?:{_BLANK}|\\s|\(\?:|[()|?*+\[\]]|\{{\d{{1,4}}(?:,\d{{0,4}})?\}})*")
"""Matches regular expressions of blanks: they have no letters outside of escapes, and no negated class."""
_JSON_SPACES = r" \t\n\r"
"""Meaning of `\\s` in JSON."""


def whitespace_options(whitespace: Any) -> dict[str, Any]:
    """Returns llguidance's options for a name or a regular expression. Raises TypeError or ValueError for anything
    else.

    A regular expression gives the whitespace allowed in each place, in addition to none; "" means "compact".
    """
    if not isinstance(whitespace, str):
        raise TypeError(f"whitespace must be a string, got {whitespace!r:.100}")
    if whitespace in ("compact", ""):
        return dict(_COMPACT)
    if whitespace == "spaced":
        return _COMPACT | {"item_separator": ", ", "key_separator": ": "}
    if whitespace == "flexible":
        return _of_pattern(FLEXIBLE)
    if len(whitespace) > _MAX_CHARACTERS or not _is_pattern(whitespace):
        raise ValueError(
            f"whitespace must be one of {', '.join(_NAMES)}, or a regular expression of at most {_MAX_CHARACTERS} "
            f"characters that matches blanks, tabs and line ends only; got {whitespace!r:.100}"
        )
    return _of_pattern(replace_escapes(whitespace, {r"\s": f"[{_JSON_SPACES}]"}, {r"\s": _JSON_SPACES}))


def _of_pattern(pattern: str) -> dict[str, Any]:
    if repeats_whitespace():  # then use commas and colons, which occur only once
        return _COMPACT | {f"{what}_separator": f"({pattern})?{mark}({pattern})?" for what, mark in _SEPARATORS.items()}
    return {"whitespace_pattern": f"({pattern})"}


def _is_pattern(text: str) -> bool:
    if not _PATTERN.fullmatch(text):
        return False
    try:
        re.compile(text)
    except re.error:
        return False
    return True
