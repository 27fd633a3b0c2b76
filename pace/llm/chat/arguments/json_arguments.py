"""Arguments as one JSON object, as in most formats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pace.llm.chat.arguments.base import Reader, Reading, Rules, State
from pace.llm.chat.literals import blank
from pace.llm.chat.schemas import closed, json_expression
from pace.llm.chat.tools import Tool

_OUTSIDE = re.compile(r'["{}\[\]<]')
"""Relevant characters outside of strings. `<` begins a tag; JSON has none there."""
_INSIDE = re.compile(r'["\\]')


class JsonArguments:
    quote = ""

    def write(self, values: Mapping[str, Any], tool: Tool) -> str:
        return json.dumps(values, ensure_ascii=False)

    def grammar(self, tool: Tool, rules: Rules, name: str) -> str:
        return rules.add(name, json_expression(closed(tool.parameters), tool.strict))

    def reader(self, tool: Tool) -> Reader:
        return _ObjectReader()


class _ObjectReader:
    """Passes an object through unchanged."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()

    def read(self, text: str) -> Reading:
        start = 0
        if not self._scanner.begun:
            start = blank(text)
            if start == len(text):
                return Reading("", start, State.MORE)
            if text[start] != "{":
                return Reading("", 0, State.BROKEN)
        end, state = self._scanner.scan(text, start)
        return Reading(text[start:end], end, state)


class JsonScanner:
    """Finds the end of a JSON object, list or string by its brackets and quotes."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self.begun = False

    def scan(self, text: str, start: int) -> tuple[int, State]:
        """Continues at `start`. Returns the position after the scanned text, and DONE if the value ends there."""
        self.begun = True
        at = start
        while at < len(text):
            if self._escaped:
                at, self._escaped = at + 1, False
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text), State.MORE
            at = found.end()
            character = found.group()
            if character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = not self._in_string
            elif character in "{[":
                self._open.append("}" if character == "{" else "]")
            elif not self._open or self._open.pop() != character:
                return found.start(), State.BROKEN
            if not self._open and not self._in_string:
                return at, State.DONE
        return at, State.MORE
