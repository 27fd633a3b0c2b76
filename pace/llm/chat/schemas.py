"""Converts JSON schemas of tools for grammars."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
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
_PLAIN = frozenset({"type", "title", "description", "default", "examples", "deprecated", "$comment"})
"""Keywords that do not constrain a string."""


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
    shared = {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}
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


def is_plain_string(schema: Mapping[str, Any]) -> bool:
    """True if the schema allows every string and nothing else."""
    return schema.get("type") == "string" and set(schema) <= _PLAIN | {"$defs", "definitions", "$schema"}


def string_choices(schema: Mapping[str, Any]) -> list[str] | None:
    """Returns the allowed strings if a schema lists them and has no other constraint; else None."""
    if schema.get("type", "string") != "string" or not set(schema) <= _PLAIN | {"enum", "$defs", "definitions"}:
        return None
    listed = schema.get("enum")
    if isinstance(listed, list) and listed and all(isinstance(value, str) for value in listed):
        return list(dict.fromkeys(listed))
    return None


def is_string(schema: Mapping[str, Any]) -> bool:
    """True if the schema allows only strings."""
    return schema.get("type") == "string" or string_choices(schema) is not None
