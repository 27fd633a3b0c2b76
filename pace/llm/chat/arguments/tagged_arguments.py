"""Arguments between separate tags: `<parameter=city>\\nRome\\n</parameter>`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pace.grammar.validation import is_valid, parse_json
from pace.llm.chat.arguments.base import Reader, Reading, Rules, State
from pace.llm.chat.arguments.json_arguments import JsonScanner
from pace.llm.chat.arguments.python_literal import LiteralReader
from pace.llm.chat.literals import MORE, NO, blank, match, pattern, terminals
from pace.llm.chat.schemas import json_expression, properties, split, type_of
from pace.llm.chat.tools import Tool

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS = {"boolean": "true|false|True|False", "null": "null|None"}
"""Values of a type, as in JSON and as in Python: some templates write earlier calls in this way."""
_NO_TEXT: dict[str, Any] = {"not": {}}
"""A schema with which a reader takes everything for JSON that it can."""


@dataclass(frozen=True)
class TaggedArguments:
    """`before name after value end`, for each argument.

    A string is written without quotes, and cannot contain `end`. Other values are JSON. So is a string with more
    constraints than a short minimum length: it has quotes. If a schema allows strings and other values, such as null, a
    text that is a valid value of the other kind is this value.
    """

    before: str
    after: str
    """Has no whitespace at its ends."""
    end: str
    """A tag without whitespace."""
    padding: str = ""
    """Text around a value that does not belong to it."""
    between: str = "\n"
    json_after: str = ""
    """`after` of a value in JSON, if it differs from that of a string without quotes. Then no text is ambiguous."""
    quote: str = ""

    def write(self, values: Mapping[str, Any], tool: Tool) -> str:
        known = properties(tool)
        texts = []
        for name, value in values.items():
            after, text = self._written(value, known.get(name, ({}, False))[0])
            texts.append(f"{self.before}{name}{after}{self.padding}{text}{self.padding}{self.end}{self.between}")
        return "".join(texts)

    def _written(self, value: Any, schema: Mapping[str, Any]) -> tuple[str, str]:
        """Returns the text before and the text of a value."""
        notation = _Notation(schema, self.end)
        if not self.json_after:
            return self.after, notation.write(value)
        if isinstance(value, str) and self.end not in value and (notation.is_text or value in notation.listed):
            return self.after, value
        return self.json_after, json.dumps(value, ensure_ascii=False)

    def grammar(self, tool: Tool, rules: Rules, name: str) -> str:
        found = []
        for index, (key, (schema, required)) in enumerate(properties(tool).items()):
            value = self._marked(key, schema, tool.strict, rules, f"{name}_{index}_value")
            between = f" /({pattern(self.between)})?/" if self.between else ""
            argument = rules.add(f"{name}_{index}", f"{value}{between}")
            found.append(argument if required else f"{argument}?")
        return rules.add(name, " ".join(found))

    def _marked(self, key: str, schema: Mapping[str, Any], strict: bool, rules: Rules, name: str) -> str:
        """Returns the expression of an argument with its tags."""

        def opening(after: str) -> str:
            return terminals(self.before + "$NAME" + after + self.padding, rules.special, key)

        if not self.json_after:
            return f"{opening(self.after)} {self._value(schema, strict, rules, name)}"
        values, tag = split(schema), terminals(self.padding + self.end, rules.special)
        listed = [choice for choice in values.choices if self.end not in choice]
        options = []
        if values.any_text:
            text = self._long_text(values.min_length, rules, name) if values.min_length else rules.until(name, self.end)
            options.append(f"{opening(self.after)} {text}")
        if listed:
            choices = rules.add(
                f"{name}_listed", " | ".join(f"/{pattern(choice)}/" if choice else '""' for choice in listed)
            )
            options.append(f"{opening(self.after)} {choices} {tag}")
        others = [*values.others, *([{"enum": list(values.choices)}] if len(listed) < len(values.choices) else [])]
        if others:
            found = rules.add(f"{name}_json", " | ".join(json_expression(other, strict) for other in others))
            options.append(f"{opening(self.json_after)} {found} {tag}")
        return rules.add(f"{name}_any", " | ".join(options)) if len(options) > 1 else options[0]

    def _value(self, schema: Mapping[str, Any], strict: bool, rules: Rules, name: str) -> str:
        """Returns the expression of a value and its end tag."""
        notation = _Notation(schema, self.end)
        if notation.min_length:
            return self._long_text(notation.min_length, rules, name)
        if notation.is_text:
            return rules.until(name, self.end)
        options = [f"/{pattern(choice)}/" for choice in notation.choices]
        for other in notation.others:
            constants = _CONSTANTS.get(type_of(other))
            options.append(f"/{constants}/" if constants else json_expression(other, strict))
        return f"{rules.add(name, ' | '.join(options))} {terminals(self.padding + self.end, rules.special)}"

    def _long_text(self, length: int, rules: Rules, name: str) -> str:
        """Returns the expression of a text of at least `length` characters and its end tag. It may not contain the tag
        itself, because a reader ends the text there."""
        tag, padding = pattern(self.end), pattern(self.padding)
        text = rf"(.|\n){{{length},}}{padding}"
        if self.padding == "\n":
            text = rf"({text}|(.|\n){{{length - 1},}}[^\n])"
        spelled = rules.add(f"{name}_text".upper(), rf"/{text}{tag}/ & ~/(.|\n)*{tag}(.|\n)+/")
        token = terminals(self.end, rules.special)
        if not token.startswith("<["):
            return spelled
        free = rules.add(name.upper(), rf"/{text}/ & ~/(.|\n)*{tag}(.|\n)*/")
        return f"({free} {token} | {spelled})"

    def reader(self, tool: Tool) -> Reader:
        return _TaggedReader(self, {name: schema for name, (schema, _) in properties(tool).items()})


class _Notation:
    """The form in which values of one schema are written."""

    def __init__(self, schema: Mapping[str, Any], end: str) -> None:
        self._schema = schema
        self._end = end
        values = split(schema)
        self.is_text = values.any_text
        """True if any text is a value, up to the first end tag."""
        self.min_length = values.min_length
        self.choices = values.choices
        """Strings that are written without quotes, besides any text."""
        self.others = values.others
        """Schemas of values that are written as JSON."""
        self.listed = values.choices
        """Strings that the schema lists."""
        if not all(map(self._is_bare, values.choices)):
            self.choices, self.others = (), (*values.others, {"enum": list(values.choices)})
        self.is_string = not self.others
        """True if values are strings without quotes, which a reader can pass on piece by piece."""

    def _is_bare(self, choice: str) -> bool:
        """True if a listed string can do without quotes."""
        is_whole = choice.strip() == choice != "" and self._end not in choice
        return is_whole and (not self.others or choice[0] not in '"[{' and self._is_read_alike(choice))

    def write(self, value: Any) -> str:
        is_bare = isinstance(value, str) and (self.is_text or value in self.choices)
        if is_bare and (self.is_string or self._is_read_alike(value)):
            return value
        return json.dumps(value, ensure_ascii=False)

    def read(self, text: str) -> str:
        """Converts a whole value to JSON text. JSON is kept, a value of Python is translated, and anything else is a
        string. So is a text that only fits the schema as a string. Where any text is a string, a string in quotes keeps
        them, unless it would be another value without them."""
        written = text if _is_json(text) else _PYTHON.get(text) or self._from_python(text)
        if written is None:
            return _quoted(text)
        value = json.loads(written)
        if self.is_text and isinstance(value, str):
            return _quoted(text) if self._is_read_alike(value) else written
        return written if not is_valid(text, self._schema) or is_valid(value, self._schema) else _quoted(text)

    def _from_python(self, text: str) -> str | None:
        """Returns the JSON of a list or dict as Python shows it; None where any text is a value, and for other text."""
        if self.is_text or not text.startswith(("[", "{", "(")):
            return None
        found = LiteralReader().read(text + ")")
        return found.piece if found.state is State.DONE and found.used == len(text) and _is_json(found.piece) else None

    def _is_read_alike(self, text: str) -> bool:
        """True if this text is the string that it is written as."""
        return self.read(text) == _quoted(text)


class _TaggedReader:
    """Reads arguments while another one follows. Strings are passed on piece by piece, other values as a whole."""

    def __init__(self, tags: TaggedArguments, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._tags = tags
        self._schemas = schemas
        self._names = sorted(schemas, key=len, reverse=True)
        self._notation: _Notation | None = None
        """Form of the current value; None between values."""
        self._padded = False
        """True if the padding before the value has been handled."""
        self._begun = False
        self._scan = _Scan()

    def read(self, text: str) -> Reading:
        pieces: list[str] = []
        at = 0
        while True:
            step = self._tag if self._notation is None else self._value
            reading = step(text[at:])
            pieces.append(reading.piece)
            at += reading.used
            if reading.state is not State.MORE or not reading.used:
                return Reading("".join(pieces), at, reading.state)

    def _tag(self, text: str) -> Reading:
        """Reads a complete `before name after`; DONE if none begins."""
        start = blank(text)
        begins = match(self._tags.before, text, start)
        if begins.end == MORE:
            return Reading("", 0, State.MORE)
        if begins.end < 0:
            return Reading("}" if self._begun else "{}", start, State.DONE)
        name, end, is_json = self._name(text, begins.end)
        if end < 0:
            return Reading("", 0, State.MORE if end == MORE else State.BROKEN)
        schema = self._schemas.get(name, {})
        if self._tags.json_after:
            schema = _NO_TEXT if is_json else {"type": "string"}
        self._notation, self._padded = _Notation(schema, self._tags.end), not self._tags.padding
        opening, quote = ", " if self._begun else "{", '"' if self._notation.is_string else ""
        self._begun = True
        return Reading(f"{opening}{json.dumps(name, ensure_ascii=False)}: {quote}", end, State.MORE)

    def _name(self, text: str, start: int) -> tuple[str, int, bool]:
        """Returns the name, the end of the tag after it, and True if that is `json_after`. The name is one of the
        schema's, which may have any characters, or else the text up to the tag."""
        for name in self._names:
            if text.startswith(name, start):
                end, is_json = self._after(text, start + len(name))
                if end != NO:
                    return name, end, is_json
            elif name.startswith(text[start:]):
                return name, MORE, False
        stop = text.find(self._tags.after.split()[0], start)
        return (text[start:stop], *self._after(text, stop)) if stop >= 0 else ("", MORE, False)

    def _after(self, text: str, start: int) -> tuple[int, bool]:
        """Returns the end of the tag after a name, and True if it is `json_after`."""
        end = match(self._tags.after, text, start).end
        if end >= 0 or not self._tags.json_after:
            return end, False
        of_json = match(self._tags.json_after, text, start).end
        return (of_json, True) if of_json != NO else (end, False)

    def _value(self, text: str) -> Reading:
        padding, tag = self._tags.padding, self._tags.end
        start = 0
        if not self._padded:
            if len(text) < len(padding) and padding.startswith(text):
                return Reading("", 0, State.MORE)
            start = len(padding) if text.startswith(padding) else 0
        if self._notation.is_string:
            self._padded = True
            return self._string(text, start)
        end = self._scan.end_tag(text, start, tag, self._notation.is_text)
        if end < 0:
            return Reading("", 0, State.MORE)
        piece = self._notation.read(text[start:end].removesuffix(padding))
        self._notation, self._scan = None, _Scan()
        return Reading(piece, end + len(tag), State.MORE)

    def _string(self, text: str, start: int) -> Reading:
        """Reads the certain part of an unquoted string, and its end tag if it has arrived."""
        closing = self._tags.padding + self._tags.end
        end = text.find(self._tags.end, start)
        if end >= 0:
            self._notation = None
            value = text[start:end].removesuffix(self._tags.padding)
            return Reading(_escaped(value) + '"', end + len(self._tags.end), State.MORE)
        held = held_back(text[start:], closing, self._tags.end)
        return Reading(_escaped(text[start : len(text) - held]), len(text) - held, State.MORE)


class _Scan:
    """Searches for the end tag of a growing value, but not in text seen before. Tags inside of a JSON string do not
    count, unless any text is a value."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._state = State.MORE
        self._at = 0

    def end_tag(self, text: str, start: int, tag: str, is_text: bool) -> int:
        """Position of the tag; negative if it has not arrived. `text` and `start` are those of the last call, or
        longer."""
        if is_text:
            found = text.find(tag, max(start, self._at))
            self._at = max(start, len(text) - len(tag) + 1)
            return found
        value = blank(text, start)
        if text[value : value + 1] in ("{", "[", '"') and self._state is State.MORE:
            self._at, self._state = self._scanner.scan(text, max(self._at, value))
            if self._state is State.MORE:
                return -1
        if self._state is State.DONE:
            found = match("\n" + tag, text, self._at)
            if found.end != NO:
                return found.end if found.end == MORE else found.end - len(tag)
        return text.find(tag, start)


def held_back(text: str, *markers: str) -> int:
    """Number of characters at the end of `text` that may begin one of `markers`."""
    longest = min(len(text), max(map(len, markers)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    """True if Python can read a text as JSON."""
    try:
        parse_json(text)
    except (ValueError, RecursionError):
        return False
    return True
