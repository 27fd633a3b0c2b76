"""JSON schemas of tools, as a grammar takes them."""

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
"""Keywords beside which a missing `additionalProperties` must stay missing."""
_TYPES = {"string": (str,), "boolean": (bool,), "integer": (int, float), "number": (int, float), "array": (list,),
          "object": (dict,), "null": (type(None),)}  # fmt: skip
"""Types of Python that values of JSON schema's types may have."""
_PLAIN = frozenset({"type", "title", "description", "default", "examples", "deprecated", "$comment"})
"""Keywords that say nothing about which strings are allowed."""


def json_expression(schema: Mapping[str, Any] | bool, strict: bool) -> str:
    """`%json {...}` for Lark."""
    return "%json " + json.dumps(for_grammar(schema, strict))


def for_grammar(schema: Mapping[str, Any] | bool, strict: bool) -> dict[str, Any]:
    """A schema as llguidance takes it: without the settings of a client, and with flexible whitespace."""
    own = whitespace_options("flexible")
    if not strict:
        own["lenient"] = True
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return {"x-guidance": own} | simplified(schema)


def closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments without arguments that it does not name, unless it says something of them."""
    named = set(parameters.get("required", ())) <= set(parameters.get("properties", ()))
    if not named or _OPENING & set(parameters):
        return dict(parameters)
    return dict(parameters) | {"additionalProperties": False}


def properties(tool: Tool) -> dict[str, tuple[dict[str, Any], bool]]:
    """The schema of each argument by its name, and whether it is required: for forms that write arguments singly.

    A schema has the definitions that it may refer to. Nothing that a schema says of several arguments together is in it.
    An argument that need not be there and cannot be, since no value is allowed, is left out.
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
    """All references in a schema."""
    if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
        yield part["$ref"]
    children = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
    for child in children:
        yield from _references(child)


def _is_elsewhere(reference: str) -> bool:
    """Whether a reference is to another place of the schema than its definitions."""
    return reference == "#" or (reference.startswith("#/") and not reference.startswith(("#/$defs/", "#/definitions/")))


def _redirected(part: Any, whole: str) -> Any:
    """A copy whose references to other places go by way of a definition of the whole schema."""
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
    """False for a schema that allows nothing: `false`, or values that are all of other types than it says."""
    if isinstance(schema, bool):
        return schema
    kind, values = schema.get("type"), schema.get("enum")
    kinds = _TYPES.get(kind) if isinstance(kind, str) else None
    return kinds is None or not isinstance(values, list) or any(type(value) in kinds for value in values)


def is_plain_string(schema: Mapping[str, Any]) -> bool:
    """Whether every string and nothing else is allowed."""
    return schema.get("type") == "string" and set(schema) <= _PLAIN | {"$defs", "definitions", "$schema"}


def string_choices(schema: Mapping[str, Any]) -> list[str] | None:
    """The strings that are allowed, where a schema lists them and nothing else."""
    if schema.get("type", "string") != "string" or not set(schema) <= _PLAIN | {"enum", "$defs", "definitions"}:
        return None
    listed = schema.get("enum")
    if isinstance(listed, list) and listed and all(isinstance(value, str) for value in listed):
        return list(dict.fromkeys(listed))
    return None


def is_string(schema: Mapping[str, Any]) -> bool:
    """Whether nothing but strings is allowed."""
    return schema.get("type") == "string" or string_choices(schema) is not None
