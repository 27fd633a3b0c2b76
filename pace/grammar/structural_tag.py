"""Structural tags: free text in which certain prefixes require a certain continuation.

Both forms of xgrammar are supported: the old one has `structures` and `triggers`, the new one a `format` made of parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pace.grammar.grammar import GivenSchema, Grammar
from pace.grammar.json_schema import prepare_schema, read_schema
from pace.grammar.limits import DEFAULT_LIMITS, GrammarLimits
from pace.grammar.whitespace import whitespace_options


def read_structural_tag(
    value: Mapping[str, Any], limits: GrammarLimits = DEFAULT_LIMITS, whitespace: str = "flexible"
) -> Grammar:
    """Returns the grammar of a structural tag. `whitespace` of its JSON is as in `Grammar.json_schema`. Raises
    TypeError or ValueError that names the place of an error."""
    writer = _Writer(limits, whitespace_options(whitespace))
    if "format" in value:
        start = writer.part(value["format"], "format", 1)
    else:
        start = writer.triggered(value.get("structures"), value.get("triggers"), "structures", True, False)
    grammar = Grammar.lark("\n".join([f"start: {start}", *writer.rules]), limits=limits)
    return replace(grammar, schemas=tuple(writer.schemas))


class _Writer:
    """Collects the rules of one grammar in llguidance's Lark."""

    def __init__(self, limits: GrammarLimits, json_options: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self.schemas: list[GivenSchema] = []
        self._limits = limits
        self._json_options = json_options

    def part(self, value: Any, place: str, depth: int) -> str:
        """Returns the Lark expression of a part of a `format`."""
        if depth > self._limits.max_depth:
            raise ValueError(f"{place[:200]} is more than {self._limits.max_depth} parts deep")
        kind = _member(value, "type", str, place)
        read = getattr(self, f"_{kind}", None) if kind in _PARTS else None
        if read is None:
            raise ValueError(f"{place}.type must be one of {', '.join(_PARTS)}; got {kind!r:.100}")
        return read(value, place, depth)

    def triggered(self, tags: Any, triggers: Any, place: str, may_be_none: bool, only_one: bool) -> str:
        """Returns the expression of free text in which each trigger begins one of the tags."""
        tags = _list(tags, place)
        triggers = [_string(trigger, "triggers") for trigger in _list(triggers, "triggers")]
        options: dict[str, list[str]] = {}
        for index, tag in enumerate(tags):
            begin = _member(tag, "begin", str, f"{place}[{index}]")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(f"{place}[{index}].begin {begin!r:.100} begins with none of the triggers")
            rest = [_quoted(begin[len(trigger) :]), *self._tag_rest(tag, f"{place}[{index}]", 2)]
            options.setdefault(trigger, []).append(" ".join(filter(None, rest)) or '""')
        parts = []
        for trigger, ways in options.items():
            lexeme = self._rule("trigger", f"/(.|\\n)*?{_regex_literal(trigger)}/", lazy=True)
            parts.append(self._rule("tag", f"{lexeme} ({' | '.join(ways)})"))
        text = self._rule("TEXT", "/(.|\\n)*/")
        tag = f"({' | '.join(parts)})"
        if only_one:
            return f"({tag} | {text})" if may_be_none else tag
        return f"{tag}{'*' if may_be_none else '+'} {text}"

    # -- the parts -----------------------------------------------------------------------------------------------------

    def _const_string(self, value: Mapping, place: str, depth: int) -> str:
        return _quoted(_member(value, "value", str, place)) or '""'

    def _json_schema(self, value: Mapping, place: str, depth: int) -> str:
        if "json_schema" not in value:
            raise ValueError(f"{place}.json_schema is missing")
        return self._schema(value["json_schema"])

    def _regex(self, value: Mapping, place: str, depth: int) -> str:
        source = json.loads(Grammar.regex(_member(value, "pattern", str, place), limits=self._limits).source)
        return self._rule("REGEX", source["grammars"][0]["lark_grammar"].removeprefix("start: "))

    def _any_text(self, value: Mapping, place: str, depth: int) -> str:
        return self._rule("TEXT", "/(.|\\n)*/")

    def _sequence(self, value: Mapping, place: str, depth: int) -> str:
        elements = _list(value.get("elements"), f"{place}.elements")
        return f"({' '.join(self._each(elements, f'{place}.elements', depth))})"

    def _or(self, value: Mapping, place: str, depth: int) -> str:
        elements = _list(value.get("elements"), f"{place}.elements")
        return f"({' | '.join(self._each(elements, f'{place}.elements', depth))})"

    def _tag(self, value: Mapping, place: str, depth: int) -> str:
        begin = _quoted(_member(value, "begin", str, place))
        return f"({' '.join(filter(None, [begin, *self._tag_rest(value, place, depth)]))})"

    def _triggered_tags(self, value: Mapping, place: str, depth: int) -> str:
        at_least_one, only_one = (_flag(value, name, place) for name in ("at_least_one", "stop_after_first"))
        return self.triggered(value.get("tags"), value.get("triggers"), f"{place}.tags", not at_least_one, only_one)

    def _tags_with_separator(self, value: Mapping, place: str, depth: int) -> str:
        at_least_one, only_one = (_flag(value, name, place) for name in ("at_least_one", "stop_after_first"))
        tags = self._each(_list(value.get("tags"), f"{place}.tags"), f"{place}.tags", depth)
        tag = self._rule("tag", " | ".join(tags))
        more = "" if only_one else f" ({_quoted(_member(value, 'separator', str, place))} {tag})*"
        return f"({tag}{more})" if at_least_one else f"({tag}{more})?"

    # ------------------------------------------------------------------------------------------------------------------

    def _each(self, elements: list[Any], place: str, depth: int) -> list[str]:
        return [self.part(element, f"{place}[{index}]", depth + 1) for index, element in enumerate(elements)]

    def _tag_rest(self, tag: Mapping, place: str, depth: int) -> list[str]:
        """Returns the expressions of a tag's content and end."""
        end = _member(tag, "end", str, place)
        if isinstance(tag.get("content"), Mapping) and tag["content"].get("type") == "any_text" and end:
            return [self._rule("text", f"/(.|\\n)*?{_regex_literal(end)}/", lazy=True)]
        if "content" in tag:
            content = self.part(tag["content"], f"{place}.content", depth + 1)
        elif "schema" in tag:
            content = self._schema(tag["schema"])
        else:
            raise ValueError(f"{place} has no content: give content, or schema")
        return [content, _quoted(end)]

    def _schema(self, schema: Any) -> str:
        given = read_schema(schema)
        prepared = prepare_schema(given, self._limits) | {"x-guidance": self._json_options}
        alone = json.dumps({"grammars": [{"json_schema": prepared}]})
        self.schemas.append(GivenSchema(given, alone, "a JSON schema of this structural tag"))
        return f"%json {json.dumps(prepared)}"

    def _rule(self, name: str, body: str, lazy: bool = False) -> str:
        """Adds a rule and returns its name; an upper-case name is a terminal."""
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


_PARTS = (
    ("const_string", "json_schema", "regex", "any_text", "sequence", "or", "tag")
    + ("triggered_tags", "tags_with_separator")
)  # fmt: skip


def _member(value: Any, name: str, kind: type, place: str) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"{place} must be an object, got {value!r:.100}")
    if name not in value:
        raise ValueError(f"{place}.{name} is missing")
    if kind is str:
        return _string(value[name], f"{place}.{name}")
    return value[name]


def _string(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{place} must be a string, got {value!r:.100}")
    return value


def _flag(value: Mapping, name: str, place: str) -> bool:
    given = value.get(name, False)
    if not isinstance(given, bool):
        raise TypeError(f"{place}.{name} must be true or false, got {given!r:.100}")
    return given


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise TypeError(f"{place} must be a list of at least one, got {value!r:.100}")
    return value


def _quoted(text: str) -> str:
    """A Lark literal; "" for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _regex_literal(text: str) -> str:
    """Escapes a text for use in a Lark regex."""
    return "".join(letter if letter.isalnum() or letter in "_<>=\"'" else f"\\x{{{ord(letter):x}}}" for letter in text)
