"""Prepares a JSON schema for llguidance: checks it, makes formats exact, and removes keywords without effect.

The draft is 2020-12, and llguidance supports a subset of it (its docs/json_schema.md). `pace.grammar.support` names the
place of an unsupported keyword.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pace.grammar.limits import DEFAULT_LIMITS, GrammarLimits
from pace.grammar.patterns import replace_escapes
from pace.grammar.validation import parse_json

ECMA_SPACES = {r"\s": r"[\s\uFEFF]", r"\S": r"[^\s\uFEFF]"}
ECMA_SPACES_IN_CLASS = {r"\s": r"\s\uFEFF"}
"""Escapes as ECMA-262 defines them: U+FEFF is a space. (A `\\S` within a class is not changed.)"""
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas."""
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains", "not",
    "if", "then", "else", "propertyNames",
)  # fmt: skip
_ANNOTATIONS = frozenset(
    ("$schema", "$id", "$anchor", "$comment", "$vocabulary", "title", "description", "default", "examples")
    + ("deprecated", "readOnly", "writeOnly")
)
ASSERTIONS = frozenset(
    ("type", "enum", "const", "$ref", "$dynamicRef", "required", "minLength", "maxLength", "pattern", "format")
    + ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems")
    + ("uniqueItems", "minContains", "maxContains", "minProperties", "maxProperties", "dependentRequired")
    + ("dependencies", *MAPS, *LISTS, *SINGLE)
)

_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(\.[0-9]+)?([Zz]|[+-]00:00))"
)
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""RFC 3339 with the right number of days for each month, and leap seconds in UTC only. llguidance's own formats allow
29 February in every year."""


def read_schema(schema: Any) -> dict[str, Any]:
    """Reads a schema given as a dict, True, its JSON text, or a pydantic model. Raises TypeError or ValueError."""
    if isinstance(schema, str):
        try:
            schema = parse_json(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema is not valid JSON: {error}") from None
    elif callable(getattr(schema, "model_json_schema", None)):
        schema = schema.model_json_schema()
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("the JSON schema is false, which allows nothing")
    if not isinstance(schema, dict):
        raise TypeError(f"a JSON schema must be a dict, its JSON text, or a pydantic model; got {schema!r:.100}")
    return schema


def prepare_schema(schema: dict[str, Any], limits: GrammarLimits) -> dict[str, Any]:
    """Returns a copy for llguidance. Raises ValueError for a schema that is too large or too deep, that is not valid
    JSON, or that has no keyword of JSON Schema."""
    if schema and not (ASSERTIONS | _ANNOTATIONS) & schema.keys():
        raise ValueError(f"{next(iter(schema))!r:.100} is not a keyword of JSON Schema, and the schema has no other")
    check_size(schema, limits)
    check_optional(schema, limits)
    for path, part in subschemas(schema):
        if "$ref" in part and ("$id" in part or "id" in part):
            raise ValueError(f"{path}/$ref: not supported next to an id, whose meaning depends on the draft")
    return simplified(schema)


def check_size(schema: Mapping[str, Any], limits: GrammarLimits) -> None:
    """Raises ValueError for a schema that is too large or too deep, or that is not valid JSON."""
    num_schemas = 0
    waiting = [("#", schema, 1)]
    while waiting:
        path, part, depth = waiting.pop()
        num_schemas += 1
        if depth > limits.max_depth:
            raise ValueError(f"the JSON schema is more than {limits.max_depth} schemas deep, at {path:.200}")
        if num_schemas > limits.max_schemas:
            raise ValueError(f"the JSON schema is made of more than {limits.max_schemas} schemas")
        waiting += [(f"{path}/{place}", child, depth + 1) for place, child in child_schemas(part)]
    try:
        text = json.dumps(schema, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError) as error:
        raise ValueError(f"the JSON schema cannot be written as JSON: {error}") from None
    if len(text) > limits.max_bytes:
        raise ValueError(f"the JSON schema has {len(text)} bytes; at most {limits.max_bytes} are taken")


def check_optional(schema: Mapping[str, Any], limits: GrammarLimits = DEFAULT_LIMITS) -> None:
    """Raises ValueError for a schema with too many optional properties in one place."""
    known: dict[int, int] = {}
    for path, part in subschemas(schema):
        try:
            count = _count_optional(part, schema, known)
        except RecursionError:
            raise ValueError(f"{path}: the JSON schema is made of too many schemas in a chain") from None
        if count > limits.max_optional:
            raise ValueError(
                f"{path}: {count} optional properties may come at one place; at most {limits.max_optional} are taken. "
                f"List more of them in required"
            )


def _count_optional(part: Any, root: Mapping[str, Any], known: dict[int, int]) -> int:
    """Counts the optional properties of a schema and of those it combines (allOf, anyOf, oneOf, `$ref`). `known` caches
    counts by the id of the schema; a recursive schema counts once."""
    if not isinstance(part, dict):
        return 0
    if id(part) not in known:
        known[id(part)] = 0
        names, required = part.get("properties"), part.get("required")
        count = len(set(names) - set(required if isinstance(required, list) else ())) if isinstance(names, dict) else 0
        made_of = [child for keyword in LISTS[:3] if isinstance(part.get(keyword), list) for child in part[keyword]]
        if isinstance(part.get("$ref"), str):
            made_of.append(_target(part["$ref"], root))
        known[id(part)] = count + sum(_count_optional(child, root, known) for child in made_of)
    return known[id(part)]


def _target(reference: str, root: Any) -> Any:
    """Resolves a JSON pointer within a schema; None if it points to nothing, and for other references."""
    pointer = unquote(reference)
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(name)
        elif isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            return None
    return root


def child_schemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields the place and value of each schema directly within a schema."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            yield from ((f"{keyword}/{pointer_part(name)}", child) for name, child in value.items())
        elif keyword in (*LISTS, "items") and isinstance(value, list):
            yield from ((f"{keyword}/{index}", child) for index, child in enumerate(value))
        elif keyword in SINGLE:
            yield keyword, value


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the path and value of each object schema within a schema, itself first."""
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        path, part = waiting.pop(0)
        if isinstance(part, dict):
            yield path, part
        waiting += [(f"{path}/{place}", child) for place, child in child_schemas(part)]


def simplified(schema: Any) -> Any:
    """Returns a copy with exact formats and without keywords that have no effect."""
    if not isinstance(schema, dict):
        return schema
    prepared = {keyword: value for keyword, value in schema.items() if not _says_nothing(keyword, schema)}
    for keyword, value in prepared.items():
        if keyword in MAPS and isinstance(value, dict):
            prepared[keyword] = {name: simplified(child) for name, child in value.items()}
        elif keyword in (*LISTS, "items") and isinstance(value, list):
            prepared[keyword] = [simplified(child) for child in value]
        elif keyword in SINGLE:
            prepared[keyword] = simplified(value)
        elif keyword == "pattern" and isinstance(value, str):
            prepared[keyword] = replace_escapes(value, ECMA_SPACES, ECMA_SPACES_IN_CLASS)
    if isinstance(form := prepared.get("format"), str) and form in _FORMATS:
        del prepared["format"]
        if "pattern" in prepared:
            prepared["allOf"] = [*prepared.get("allOf", []), {"pattern": _FORMATS[form]}]
        else:
            prepared["pattern"] = _FORMATS[form]
    return prepared


def _says_nothing(keyword: str, schema: dict[str, Any]) -> bool:
    """True if a keyword has no effect in this schema. Options for llguidance count too, because schemas must not set
    them."""
    if keyword == "x-guidance" or (keyword == "uniqueItems" and schema[keyword] is False):
        return True
    if keyword in ("then", "else"):
        return "if" not in schema
    if keyword == "if":
        return "then" not in schema and "else" not in schema
    return keyword in ("minContains", "maxContains") and "contains" not in schema


def pointer_part(name: str) -> str:
    """Escapes a name for a JSON pointer. Source: RFC 6901."""
    return str(name).replace("~", "~0").replace("/", "~1")
