"""Arguments as Gemma 4 writes them: `city:<|"|>Rome<|"|>,days:3,tags:[<|"|>a<|"|>]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pace.grammar.validation import is_valid
from pace.llm.chat.arguments.base import Reader, Rules
from pace.llm.chat.arguments.gemma_reader import QUOTE, MembersReader
from pace.llm.chat.literals import pattern, terminals
from pace.llm.chat.schemas import alternatives, json_expression, keywords_of, listed, properties, sharing
from pace.llm.chat.tools import Tool

_BARE_KEY = re.compile(r'[^\s:{}\[\],<>"]([^:{}\[\],<>"]*[^\s:{}\[\],<>"])?')
"""A key that needs no quotes."""
_COMMA, _COLON = "/,( )?/", ":( )?"
_MAX_DEPTH = 6
"""Lists and objects within each other that are written in this notation; deeper ones are JSON."""
_MAX_COUNT = 256
"""Largest bound of a length that a grammar counts; values with a larger one are JSON."""
_LENGTHS = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}
IMPOSSIBLE: dict[str, Any] = {"not": {}}
"""A schema that allows no value."""
_KEYWORDS = {
    "string": {"type", "minLength", "maxLength"},
    "array": {"type", "items", "minItems", "maxItems"},
    "object": {"type", "properties", "required", "additionalProperties"},
    "boolean": {"type"},
    "null": {"type"},
}
"""Type -> keywords with which its values are written in this notation."""


class GemmaArguments:
    """Values without JSON's quotes, in the order of their keys, as Gemma's template shows them.

    A string is between `<|"|>` and cannot contain this mark. Strings with a pattern or a format are JSON, and so are
    values of schemas that cannot be taken apart. The reader accepts both notations at any depth.
    """

    quote = QUOTE

    def write(self, values: Mapping[str, Any], tool: Tool) -> str:
        known = {key: schema for key, (schema, _) in properties(tool).items()}
        return _written_members(values, known, _MAX_DEPTH)

    def grammar(self, tool: Tool, rules: Rules, name: str) -> str:
        return _Builder(rules, tool.strict).members(properties(tool), name, _MAX_DEPTH)

    def reader(self, tool: Tool) -> Reader:
        return MembersReader()


def _in_order(keys: Mapping[str, Any]) -> list[str]:
    """Returns the keys in the order of Jinja's `dictsort`."""
    return sorted(keys, key=str.lower)


def _form(schema: Mapping[str, Any], depth: int) -> str:
    """Returns how values of a schema without alternatives are written: "any", "listed", "number", "json", or their
    type."""
    keywords, kind = keywords_of(schema), schema.get("type")
    if not keywords:
        return "any"
    if keywords - {"type"} in ({"enum"}, {"const"}) and isinstance(schema.get("enum", []), list):
        return "listed"
    if kind in ("integer", "number"):
        return "number"
    if not isinstance(kind, str) or not keywords <= _KEYWORDS.get(kind, set()):
        return "json"
    bounds = [schema[name] for name in _LENGTHS.get(kind, ()) if name in schema]
    if not all(type(bound) is int and 0 <= bound <= _MAX_COUNT for bound in bounds):
        return "json"
    if kind in ("array", "object") and not depth:
        return "json"
    shapes = {"items": Mapping, "properties": Mapping, "required": list}
    if not all(isinstance(schema[name], shape) for name, shape in shapes.items() if name in schema):
        return "json"
    if kind == "object" and schema.get("properties") and schema.get("additionalProperties", False) is not False:
        return "json"
    return kind


# -- writing -----------------------------------------------------------------------------------------------------------


def _written_members(values: Mapping[str, Any], schemas: Mapping[str, Any], depth: int) -> str:
    return ",".join(
        f"{_written_key(key)}:{_written(values[key], schemas.get(key, {}), depth)}" for key in _in_order(values)
    )


def _written_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def _quoted(text: str) -> str:
    return f"{QUOTE}{text}{QUOTE}" if QUOTE not in text else json.dumps(text, ensure_ascii=False)


def _written(value: Any, schema: Mapping[str, Any], depth: int) -> str:
    """Returns the text of a value."""
    fitting = next((part for part in alternatives(schema) if is_valid(value, part)), {})
    form = _form(fitting, depth)
    if form == "json" or (form == "listed" and not isinstance(value, str)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        items = sharing(fitting, fitting.get("items", {}))
        return "[" + ",".join(_written(item, items, depth - 1) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + _written_members(value, _members_of(fitting), depth - 1) + "}"
    return json.dumps(value)


def _members_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schemas of an object's named members, with the definitions that they refer to."""
    return {key: _schema(schema, own) for key, own in schema.get("properties", {}).items()}


def _schema(whole: Mapping[str, Any], part: Any) -> dict[str, Any]:
    return sharing(whole, part if isinstance(part, Mapping) else {} if part else IMPOSSIBLE)


# -- the grammar -------------------------------------------------------------------------------------------------------


class _Builder:
    """Builds the rules of one tool's arguments. Methods return Lark expressions."""

    def __init__(self, rules: Rules, strict: bool) -> None:
        self._rules = rules
        self._strict = strict
        self._quote = terminals(QUOTE, rules.special)

    def members(self, known: Mapping[str, tuple[Mapping[str, Any], bool]], name: str, depth: int) -> str:
        """Members of an object, in order. `known` has the schema of each, and True if it is required."""
        keys = _in_order(known)
        for index, key in enumerate(keys):
            value = self.value(known[key][0], f"{name}_{index}_value", depth)
            self._rules.add(f"{name}_{index}", f"{self._key(key)} {value}")
        return self._rules.some(name, [known[key][1] for key in keys], _COMMA)

    def value(self, schema: Mapping[str, Any], name: str, depth: int) -> str:
        parts = alternatives(schema)
        options = [self._one(part, f"{name}_{index}", depth) for index, part in enumerate(parts)]
        return f"({' | '.join(dict.fromkeys(options))})"

    def _one(self, schema: Mapping[str, Any], name: str, depth: int) -> str:
        form = _form(schema, depth)
        if form == "any":
            return self._any()
        if form == "listed":
            return self._listed(listed(schema), name)
        if form == "string":
            return self._text(schema.get("minLength", 0), schema.get("maxLength"), name)
        if form == "boolean":
            return "/true|false/"
        if form == "null":
            return "/null|None/"
        if form == "array":
            return self._array(schema, name, depth)
        if form == "object":
            return self._object(schema, name, depth)
        return json_expression(schema, self._strict)

    def _listed(self, values: list[Any], name: str) -> str:
        options = [self._constant(value) for value in values]
        return self._rules.add(name, " | ".join(options)) if options else json_expression({"enum": []}, self._strict)

    def _constant(self, value: Any) -> str:
        if not isinstance(value, str) or QUOTE in value:
            return json_expression({"const": value}, self._strict)
        return f"{self._quote} {f'/{pattern(value)}/ ' if value else ''}{self._quote}"

    def _text(self, least: int, most: int | None, name: str) -> str:
        if (least, most) == (0, None):
            return f"{self._quote} {self._rules.until('gemma_text', QUOTE)}"
        mark, text = pattern(QUOTE), rf"(.|\n){{{least},{'' if most is None else most}}}"
        spelled = self._rules.add(f"{name}_spelled".upper(), rf"/{text}{mark}/ & ~/(.|\n)*{mark}(.|\n)+/")
        if not self._quote.startswith("<["):
            return f"{self._quote} {spelled}"
        free = self._rules.add(f"{name}_free".upper(), rf"/{text}/ & ~/(.|\n)*{mark}(.|\n)*/")
        return f"{self._quote} ({free} {self._quote} | {spelled})"

    def _array(self, schema: Mapping[str, Any], name: str, depth: int) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0 and not least:
            return "/\\[( )?\\]/"
        item = self._rules.add(name, self.value(sharing(schema, schema.get("items", {})), f"{name}_item", depth - 1))
        more = f"{max(0, least - 1)},{'' if most is None else most - 1}"
        items = f"{item} ({_COMMA} {item}){{{more}}}"
        return f"(/\\[( )?/ {items if least else f'({items})?'} /( )?\\]/)"

    def _object(self, schema: Mapping[str, Any], name: str, depth: int) -> str:
        known, required = _members_of(schema), schema.get("required", ())
        known |= {key: {} for key in required if key not in known}
        known = {key: own for key, own in known.items() if key in required or own != IMPOSSIBLE}
        if known or schema.get("additionalProperties") is False:
            inner = self.members(
                {key: (own, key in required) for key, own in known.items()}, f"{name}_member", depth - 1
            )
            return f"(/\\{{( )?/ {inner} /( )?\\}}/)"
        others = _schema(schema, schema.get("additionalProperties", {}))
        value = self._rules.add(name, self.value(others, f"{name}_value", depth - 1))
        return self._open_object(value)

    def _any(self) -> str:
        """Any value, at any depth."""
        if "gemma_any" not in self._rules.lines:
            self._rules.lines["gemma_any"] = ""  # for its own parts
            kinds = [self._text(0, None, ""), json_expression({"type": "number"}, False), "/true|false|null|None/"]
            kinds += [f"/\\[( )?/ (gemma_any ({_COMMA} gemma_any)*)? /( )?\\]/", self._open_object("gemma_any")]
            self._rules.add("gemma_any", " | ".join(kinds))
        return "gemma_any"

    def _open_object(self, value: str) -> str:
        """An object of any keys, whose values follow a rule."""
        if "gemma_key" not in self._rules.lines:
            bare = r'/[^ \t\r\n:{}\[\],<>"\\]+' + f"{_COLON}/"
            self._rules.add("gemma_key", f"{bare} | {self._text(0, None, '')} /{_COLON}/")
        return f"(/\\{{( )?/ (gemma_key {value} ({_COMMA} gemma_key {value})*)? /( )?\\}}/)"

    def _key(self, key: str) -> str:
        if _BARE_KEY.fullmatch(key):
            return f"/{pattern(key)}{_COLON}/"
        return f"{self._constant(key)} /{_COLON}/"
