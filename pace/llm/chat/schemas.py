"""Converts JSON schemas of tools for grammars."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pace.grammar.json_schema import simplified
from pace.grammar.whitespace import whitespace_options
from pace.llm.chat.tools import Tool

_OPENING = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "$ref",
                      "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "minProperties"})  # fmt: skip
"""Keywords that allow unnamed properties: with one of them, a missing `additionalProperties` must stay missing."""
_TYPES = {"string": (str,), "boolean": (bool,), "integer": (int, float), "number": (int, float), "array": (list,),
          "object": (dict,), "null": (type(None),)}  # fmt: skip
"""Python types of values of each JSON schema type."""
_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
)
"""Keywords that constrain no value."""
_SHARED = ("$defs", "definitions", "$schema")
"""Keywords that a part of a schema takes over from the whole."""
_MAX_STEPS = 8
"""Nested alternatives and references that are followed, so that an endless reference ends."""
_MAX_MIN_LENGTH = 8
"""Larger minimum lengths of strings count as further constraints, because they make large terminals."""
_MAX_ALTERNATIVES = 64
"""A schema with more alternatives is not split: references may make them exponentially many."""


def json_expression(schema: Mapping[str, Any] | bool, strict: bool) -> str:
    """Returns `%json {...}` for Lark."""
    return "%json " + json.dumps(for_grammar(schema, strict))


def for_grammar(schema: Mapping[str, Any] | bool, strict: bool) -> dict[str, Any]:
    """Returns a schema for llguidance: without options that a client set for it, and with flexible whitespace."""
    own = whitespace_options("flexible")
    if not strict:
        own["lenient"] = True
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return {"x-guidance": own} | simplified(schema)


def closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments with unnamed arguments forbidden, unless it has a keyword about them."""
    named = set(parameters.get("required", ())) <= set(parameters.get("properties", ()))
    if not named or _OPENING & set(parameters):
        return dict(parameters)
    return dict(parameters) | {"additionalProperties": False}


def properties(tool: Tool) -> dict[str, tuple[dict[str, Any], bool]]:
    """Maps each argument to its schema and True if it is required, for notations that write arguments separately.

    Each schema includes the definitions that it may refer to, but no constraint on several arguments together. An
    optional argument that allows no value is left out.
    """
    schema = tool.parameters
    shared = {key: schema[key] for key in _SHARED if key in schema}
    if any(map(_is_elsewhere, _references(schema))):
        whole = next(name for name in map("whole_{}".format, itertools.count()) if name not in schema.get("$defs", {}))
        rest = {key: value for key, value in schema.items() if key not in shared}
        schema, shared = _redirected(schema, whole), _redirected(shared, whole)
        shared["$defs"] = {**shared.get("$defs", {}), whole: _redirected(rest, whole)}
    required = schema.get("required", ())
    known = dict(schema.get("properties", {})) | {k: {} for k in required if k not in schema.get("properties", {})}
    found = {}
    for name, own in known.items():
        if name in required or _possible(own):
            found[name] = (
                ({} if own is True else {"not": {}} if own is False else dict(own)) | shared,
                name in required,
            )
    return found


def _references(part: Any) -> Iterator[str]:
    """Yields all references in a schema."""
    if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
        yield part["$ref"]
    children = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
    for child in children:
        yield from _references(child)


def _is_elsewhere(reference: str) -> bool:
    """True if a reference points into the schema outside of its definitions."""
    return reference == "#" or (reference.startswith("#/") and not reference.startswith(("#/$defs/", "#/definitions/")))


def _redirected(part: Any, whole: str) -> Any:
    """Returns a copy in which references outside of the definitions go through a definition of the whole schema."""
    if isinstance(part, list):
        return [_redirected(child, whole) for child in part]
    if not isinstance(part, Mapping):
        return part
    copied = {key: _redirected(child, whole) for key, child in part.items()}
    reference = part.get("$ref")
    if isinstance(reference, str) and _is_elsewhere(reference):
        copied["$ref"] = f"#/$defs/{whole}{reference[1:]}"
    return copied


def _possible(schema: Mapping[str, Any] | bool) -> bool:
    """False if a schema allows no value: `false`, or only values of the wrong type."""
    if isinstance(schema, bool):
        return schema
    kind, values = schema.get("type"), schema.get("enum")
    kinds = _TYPES.get(kind) if isinstance(kind, str) else None
    return kinds is None or not isinstance(values, list) or any(type(value) in kinds for value in values)


@dataclass(frozen=True)
class Values:
    """The values that a schema allows, for notations that write strings without JSON's quotes."""

    any_text: bool
    """True if every string is allowed that is long enough."""
    choices: tuple[str, ...]
    """Strings that the schema lists; none if every string is allowed."""
    others: tuple[dict[str, Any], ...]
    """Schemas of the other values. Null, booleans and a list of any length have one each, all others one together. A
    string of these has further constraints."""
    min_length: int = 0
    """Minimum length of a string if no other values are allowed."""


def split(schema: Mapping[str, Any]) -> Values:
    """Returns the values that a schema allows, through `anyOf`, lists of types and references to definitions."""
    any_text, choices = False, []
    own: dict[str | None, dict[str, Any]] = {}
    rest: list[dict[str, Any]] = []
    parts = alternatives(schema)
    if len(parts) == 1 and (length := _min_length(parts[0])):
        return Values(True, (), (), length)
    for part in parts:
        keywords, kind = keywords_of(part), "array" if items_of(part) is not None else type_of(part)
        if not keywords:
            return Values(True, (), (part,))
        if kind == "string":
            any_text = True
        elif kind in ("null", "boolean", "array") and own.setdefault(kind, part) == part:
            continue
        elif keywords - {"type"} in ({"enum"}, {"const"}) and isinstance(part.get("enum", []), list):
            values = listed(part)
            choices += [value for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            rest += [{"enum": others}] if others or not values else []
        else:
            rest.append(part)
    if len(rest) > 1:
        rest = [sharing(schema, {"anyOf": [{key: part[key] for key in part if key not in _SHARED} for part in rest]})]
    return Values(any_text, () if any_text else tuple(dict.fromkeys(choices)), (*own.values(), *rest))


def alternatives(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns schemas that together allow the values of a schema, and have no alternatives of their own; the schema
    itself if there are too many."""
    parts = list(itertools.islice(_alternatives(schema, _MAX_STEPS), _MAX_ALTERNATIVES + 1))
    return parts if len(parts) <= _MAX_ALTERNATIVES else [dict(schema)]


def keywords_of(schema: Mapping[str, Any]) -> set[str]:
    """The keywords of a schema that constrain its values."""
    return set(schema) - _NOTES - set(_SHARED)


def type_of(schema: Mapping[str, Any]) -> str | None:
    """Returns the type that a schema has as its only constraint; None if it has another, or none."""
    kind = schema.get("type")
    return kind if isinstance(kind, str) and keywords_of(schema) == {"type"} else None


def items_of(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the schema of the items of a list that has no other constraint; None for any other schema."""
    items = schema.get("items", {})
    if schema.get("type") != "array" or not keywords_of(schema) <= {"type", "items"} or not isinstance(items, Mapping):
        return None
    return sharing(schema, items)


def _alternatives(schema: Mapping[str, Any], steps: int) -> Iterator[dict[str, Any]]:
    """Yields schemas that together allow the values of a schema. After `steps` steps a schema is not split further."""
    keywords, kinds = keywords_of(schema), schema.get("type")
    several = next((schema[key] for key in ("anyOf", "oneOf") if keywords == {key}), None)
    if steps and _are_schemas(several) and ("anyOf" in schema or _have_own_types(several)):
        for part in several:
            yield from _alternatives(sharing(schema, part), steps - 1)
    elif steps and keywords == {"$ref"} and (found := _definition(schema)) is not None:
        yield from _alternatives(sharing(schema, found), steps - 1)
    elif steps and isinstance(kinds, list) and kinds:
        for kind in kinds:
            yield from _alternatives(dict(schema) | {"type": kind}, steps - 1)
    else:
        yield dict(schema)


def sharing(schema: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part of a schema with its draft, and with the definitions if it refers to any."""
    shared = _SHARED if any(_references(part)) else ("$schema",)
    return {key: schema[key] for key in shared if key in schema} | dict(part)


def _definition(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the definition to which a schema refers; None if it is elsewhere."""
    place, _, name = str(schema["$ref"]).rpartition("/")
    known = schema.get(place.removeprefix("#/")) if place in ("#/$defs", "#/definitions") else None
    found = known.get(name) if isinstance(known, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _are_schemas(several: Any) -> bool:
    return isinstance(several, list) and several != [] and all(isinstance(part, Mapping) for part in several)


def _have_own_types(schemas: list[Mapping[str, Any]]) -> bool:
    """True if no value fits two of the schemas, since each has a type of its own."""
    kinds = [part.get("type") for part in schemas]
    names = ["number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str)]
    return len({*names}) == len(kinds)


def _min_length(schema: Mapping[str, Any]) -> int:
    """Returns the length of the shortest string if the schema allows all longer ones, and no other values; else 0."""
    length = schema.get("minLength")
    is_text = schema.get("type") == "string" and keywords_of(schema) == {"type", "minLength"}
    return length if is_text and isinstance(length, int) and 0 < length <= _MAX_MIN_LENGTH else 0


def listed(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the values that a schema lists, without those of another type than its own."""
    listed, kind = schema.get("enum", [schema.get("const")]), schema.get("type")
    kinds = _TYPES.get(kind) if isinstance(kind, str) else None
    return [value for value in listed if kinds is None or type(value) in kinds]
