"""Arguments as in a Python call: `city="Rome", days=3`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pace.grammar.validation import is_valid
from pace.grammar.whitespace import FLEXIBLE
from pace.llm.chat.arguments.base import Reader, Reading, Rules, State
from pace.llm.chat.arguments.python_literal import LiteralReader
from pace.llm.chat.literals import blank, pattern
from pace.llm.chat.schemas import items_of, json_expression, keywords_of, properties, split, type_of
from pace.llm.chat.tools import Tool

_NAME = re.compile(r"[^\W\d]\w*")
_EQUALS = re.compile(r"\s*=")
_CHARACTER = r"([^'\\\x00-\x1f\x7f]|\\(['\\bfnrt]|u00[0-1][0-9a-f]))"
"""A character of a Python string in single quotes, in Lark."""
_BLANK = f"({FLEXIBLE})?"
_CONSTANTS = {"boolean": "True|False", "null": "None|null"}
_MAX_DEPTH = 2
"""Lists within lists that may be written as in Python; deeper ones are JSON."""


class PythonArguments:
    """Values are written as JSON, which Python mostly reads alike. Booleans, nulls and strings without further
    constraints in the schema may be written as in Python, also in lists. The reader accepts both notations at any
    depth."""

    quote = ""

    def write(self, values: Mapping[str, Any], tool: Tool) -> str:
        known = properties(tool)
        return ", ".join(f"{key}={_written(value, known.get(key, ({}, False))[0])}" for key, value in values.items())

    def grammar(self, tool: Tool, rules: Rules, name: str) -> str:
        known = list(properties(tool).items())
        for index, (key, (schema, _)) in enumerate(known):
            rules.add(f"{name}_{index}", f"/{pattern(key)}=/ {_value(schema, tool.strict)}")
        return rules.some(name, [needed for _, (_, needed) in known], "/,( )?/")

    def reader(self, tool: Tool) -> Reader:
        return _KeywordReader(sorted(properties(tool), key=len, reverse=True))


def _value(schema: Mapping[str, Any], strict: bool, depth: int = _MAX_DEPTH) -> str:
    """Returns the expression of a value."""
    values = split(schema)
    options = []
    if values.any_text:
        options.append(json_expression({"type": "string", "minLength": values.min_length}, strict))
        options.append(f"/'{_CHARACTER}{{{values.min_length},}}'/")
    if values.choices:
        options.append(json_expression({"enum": list(values.choices)}, strict))
        options += [f"/{pattern(_quoted(choice))}/" for choice in values.choices]
    for other in values.others:
        items = items_of(other) if depth else None
        constants = _CONSTANTS.get(type_of(other)) or (None if keywords_of(other) else "True|False|None")
        options += [f"/{constants}/"] if constants else []
        if items is not None:
            item = _value(items, strict, depth - 1)
            options.append(f"(/\\[{_BLANK}/ ({item} (/,{_BLANK}/ {item})*)? /{_BLANK}\\]/)")
        elif type_of(other) not in _CONSTANTS:
            options.append(json_expression(other, strict))
    return f"({' | '.join(options)})"


def _written(value: Any, schema: Mapping[str, Any], depth: int = _MAX_DEPTH) -> str:
    """Returns the text of a value."""
    values = split(schema)
    if isinstance(value, str) and (values.any_text or value in values.choices):
        return _quoted(value)
    kinds = [type_of(other) if keywords_of(other) else "any" for other in values.others]
    if isinstance(value, bool) and {"boolean", "any"} & {*kinds} or value is None and {"null", "any"} & {*kinds}:
        return str(value)
    if isinstance(value, list) and depth:
        lists = (other for other in values.others if is_valid(value, other))
        if (items := next((found for found in map(items_of, lists) if found is not None), None)) is not None:
            return "[" + ", ".join(_written(item, items, depth - 1) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    """Quotes a text as a Python string in single quotes."""
    return "'" + json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"


class _KeywordReader:
    """Reads `key=value, ...` up to the closing bracket, which it does not consume."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._value: LiteralReader | None = None
        self._begun = False

    def read(self, text: str) -> Reading:
        pieces: list[str] = []
        at = 0
        while True:
            if self._value is None:
                piece, at, state = self._key(text, at)
                pieces.append(piece)
                if self._value is None:
                    return Reading("".join(pieces), at, state)
            reading = self._value.read(text[at:])
            pieces.append(reading.piece)
            at += reading.used
            if reading.state is not State.DONE:
                return Reading("".join(pieces), at, reading.state)
            self._value = None

    def _key(self, text: str, start: int) -> tuple[str, int, State]:
        """Reads a complete `key=` or `, key=` and creates the reader of its value. Consumes nothing if it is
        incomplete; DONE at the closing bracket."""
        at = blank(text, start)
        if text[at : at + 1] == ")":
            return "}" if self._begun else "{}", at, State.DONE
        if self._begun and at < len(text):
            if text[at] != ",":
                return "", start, State.BROKEN
            at = blank(text, at + 1)
        if at == len(text):
            return "", start, State.MORE
        name = self._name(text, at)
        equals = _EQUALS.match(text, at + len(name))
        if not equals or not name:
            return "", start, State.MORE if _may_grow(text[at:], name, self._names) else State.BROKEN
        self._value = LiteralReader()
        opening = ", " if self._begun else "{"
        self._begun = True
        return f"{opening}{json.dumps(name, ensure_ascii=False)}: ", equals.end(), State.MORE

    def _name(self, text: str, at: int) -> str:
        """Returns the name before `=`: one of the tool's, which may have any characters, or else a Python
        identifier."""
        known = (n for n in self._names if text.startswith(n, at) and _EQUALS.match(text, at + len(n)))
        found = _NAME.match(text, at)
        return next(known, found.group() if found else "")


def _may_grow(text: str, name: str, names: list[str]) -> bool:
    """True if more text may complete `name =`."""
    return any(n.startswith(text) or text.rstrip() == n for n in names) or (name != "" and text.rstrip() == name)
