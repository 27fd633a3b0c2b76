"""Calls without the marks of the model's format: plain JSON, JSON in a code block, or JSON in another tag.

    {"name": "f", "arguments": {"n": 1}}

Accepts one object, several, or a list. They are calls if each names a tool and has arguments that match its schema;
anything else is text. The braces of a call may be doubled, as in the template of Qwen2.5-Coder. Or only the first brace
is, as that model then writes.

In formats with two tags around a call, the outer ones may be missing, as Qwen3-Coder leaves them out at times:

    <function=f>
    <parameter=n>
    1
    </parameter>
    </function>
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pace.grammar.validation import is_valid, parse_json
from pace.llm.chat.arguments import Reader, State
from pace.llm.chat.arguments.json_arguments import JsonScanner
from pace.llm.chat.format import ToolFormat
from pace.llm.chat.literals import MORE, NO, Match, blank, match
from pace.llm.chat.tools import Tool

FENCE = "```"
LANGUAGES = ("", "json", "JSON", "jsonc", "json5", "xml", "tool_call", "tool_calls", "tool_code", "tools")
"""Languages of a code block that may hold calls."""
TAGS = ("tool_call", "tool_calls", "tools", "tool", "function_call", "json")
SIGNS = "`<[{"
"""Characters with which calls begin."""
_MEMBERS = ("name", "arguments", "parameters", "type", "id")


@dataclass(frozen=True)
class Untagged:
    """Calls found in a text: the end of them, or MORE or NO, and their names and arguments."""

    end: int
    calls: tuple[tuple[str, str], ...] = ()


class _Stop(Exception):
    """Raised if the text holds no calls so far; `end` is MORE if it still may, else NO."""

    def __init__(self, end: int) -> None:
        self.end = end


class _ArgumentsScanner:
    """Finds the end of arguments with their reader, and collects them as JSON text."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._pieces: list[str] = []

    def scan(self, text: str, start: int) -> tuple[int, State]:
        """Continues at `start`, like `JsonScanner.scan`."""
        reading = self._reader.read(text[start:])
        self._pieces.append(reading.piece)
        return start + reading.used, reading.state

    def text(self) -> str:
        return "".join(self._pieces)


Scans = dict[int, tuple[JsonScanner | _ArgumentsScanner, int, State]]
"""Scanned values by their position in the text: the scanner, how far it came, and its state."""


def find_untagged(
    text: str, start: int, format: ToolFormat, tools: Mapping[str, Tool], is_final: bool, scans: Scans
) -> Untagged:
    """Finds the calls that begin at `start`, with the text around them. With `is_final` the text is complete, and a
    code block or tag need not be closed. `scans` holds values that an earlier call scanned in the same text, and is
    updated."""
    reader = _Reader(text, start, format, tools, is_final, scans)
    try:
        reader.block()
    except _Stop as stop:
        return Untagged(NO if is_final else stop.end)
    return Untagged(reader.at, tuple(reader.calls))


class _Reader:
    """Reads on from `at`, or raises _Stop."""

    def __init__(
        self, text: str, at: int, format: ToolFormat, tools: Mapping[str, Tool], is_final: bool, scans: Scans
    ) -> None:
        self.at = at
        self._format = format
        self._scans = scans
        self.calls: list[tuple[str, str]] = []
        self._text = text
        self._tools = tools
        self._is_final = is_final

    def block(self) -> None:
        """Reads calls, with an optional code block, tag, or both around them."""
        closings = []
        if self._takes(FENCE):
            self._one_of(
                [language + end for language in LANGUAGES for end in ("\n", "\r\n", " ", "{", "[", "<")], "\n\r {[<"
            )
            closings.append(FENCE)
        if self._next() == "<" and self._bare_head() is None:
            tag = self._one_of([f"<{tag}>" for tag in TAGS])
            closings.append(f"</{tag[1:]}")
        is_several = bool(closings)
        if self._next() == "[":
            self._takes("[")
            closings.append("]")
            is_several = True
        self._call()
        while is_several and self._has_more():
            self._call()
        for closing in reversed(closings):
            if self._next() == "" and self._is_final and closing != "]":
                return
            if not self._takes(closing):
                raise _Stop(NO)

    def _has_more(self) -> bool:
        """True if another call follows, with or without a comma before it."""
        if self._next() == ",":
            self.at += 1
        return self._next() == "{" or self._bare_head() is not None

    def _bare_head(self) -> Match | None:
        """Matches the head of a call without its outer tags."""
        if self._format.bare is None:
            return None
        found = match(self._format.bare[0], self._text, self.at, self._tools)
        if found.end == MORE:
            raise _Stop(MORE)
        return found if found.end >= 0 else None

    def _bare_call(self, head: Match) -> None:
        """Reads the rest of a call without its outer tags, and its outer closing tag if there is one."""
        name = head.holes["NAME"]
        scanner = self._scan(head.end, lambda: _ArgumentsScanner(self._format.arguments.reader(self._tools[name])))
        self.calls.append((name, self._checked(name, scanner.text())))
        _, tail, closing = self._format.bare
        if not self._takes(tail):
            raise _Stop(NO)
        end = self.at
        if not self._takes(closing):
            self.at = end

    def _call(self) -> None:
        """Reads one call and appends it to `calls`."""
        self._next()
        if (head := self._bare_head()) is not None:
            return self._bare_call(head)
        if not self._takes("{"):
            raise _Stop(NO)
        is_doubled = self._next() == "{"
        self.at += is_doubled
        found: dict[str, str] = {}
        while True:
            member = self._one_of([f'"{name}"' for name in _MEMBERS])[1:-1]
            member = "arguments" if member == "parameters" else member
            if member in found or not self._takes(":"):
                raise _Stop(NO)
            found[member] = self._value(member)
            if not self._takes(","):
                break
        if not self._takes("}"):
            raise _Stop(NO)
        end = self.at
        if is_doubled and self._next() == "}":
            end = self.at + 1
        self.at = end
        self.calls.append((found.get("name", "")[1:-1], self._arguments(found)))

    def _value(self, member: str) -> str:
        if member == "name":
            return self._one_of([f'"{name}"' for name in self._tools])
        if member == "type":
            return self._one_of(['"function"'])
        if self._next() != '"' and (member == "id" or self._next() != "{"):
            raise _Stop(NO)
        start = self.at
        self._scan(start, JsonScanner)
        return self._text[start : self.at]

    def _scan(self, start: int, begin: Callable[[], Any]) -> Any:
        """Reads the value at `start` with the scanner that `begin` returns, and returns the scanner."""
        scanner, end, state = self._scans.get(self.at) or (begin(), start, State.MORE)
        if state is State.MORE:
            end, state = scanner.scan(self._text, end)
            self._scans[self.at] = scanner, end, state
        if state is not State.DONE:
            raise _Stop(MORE if state is State.MORE else NO)
        self.at = end
        return scanner

    def _arguments(self, found: Mapping[str, str]) -> str:
        """Returns the arguments of a call as JSON text."""
        if "name" not in found or "arguments" not in found:
            raise _Stop(NO)
        return self._checked(found["name"][1:-1], found["arguments"])

    def _checked(self, name: str, text: str) -> str:
        """Returns arguments as the text of a JSON object, from this text or a string that holds it."""
        try:
            values = parse_json(text)
            if isinstance(values, str):
                text = values
                values = parse_json(text)
        except (ValueError, RecursionError):
            raise _Stop(NO) from None
        if not isinstance(values, dict) or not is_valid(values, dict(self._tools[name].parameters)):
            raise _Stop(NO)
        return text

    # -- characters ----------------------------------------------------------------------------------------------------

    def _next(self) -> str:
        """The next character that is not whitespace; "" at the end of a complete text."""
        self.at = blank(self._text, self.at)
        if self.at == len(self._text) and not self._is_final:
            raise _Stop(MORE)
        return self._text[self.at : self.at + 1]

    def _takes(self, literal: str) -> bool:
        """True if `literal` comes next, after optional whitespace; it is consumed."""
        self._next()
        rest = self._text[self.at : self.at + len(literal)]
        if rest != literal:
            if literal.startswith(rest) and not self._is_final:
                raise _Stop(MORE)
            return False
        self.at += len(literal)
        return True

    def _one_of(self, literals: list[str], kept: str = "") -> str:
        """Reads the one of `literals` that comes next, and returns it. Characters of `kept` at its end are not
        consumed."""
        if not kept:
            self._next()
        for literal in literals:
            if self._text.startswith(literal, self.at):
                self.at += len(literal.rstrip(kept) if kept else literal)
                return literal
        rest = self._text[self.at : self.at + max(map(len, literals))]
        raise _Stop(MORE if any(literal.startswith(rest) for literal in literals) else NO)
