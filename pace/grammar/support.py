"""llguidance's support of JSON Schema: errors with their place in the schema, and schemas without unsupported
keywords."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from pace.grammar.backend import problem_of
from pace.grammar.json_schema import ASSERTIONS, LISTS, MAPS, SINGLE, pointer_part, simplified, subschemas

_ALONE = ASSERTIONS.difference(
    MAPS, LISTS, SINGLE, ("$ref", "$dynamicRef", "required", "enum", "const", "dependencies", "dependentRequired")
)
"""Keywords that can be checked on their own: their values hold no schemas, names or constants."""


def explain(error: str, schema: dict[str, Any]) -> str:
    """Returns an error of llguidance about a schema, with the place in the schema."""
    if match := re.search(r"Unimplemented keys: (\[.*?\])", error):
        keywords = json.loads(match.group(1))
        return _at(schema, "not supported", lambda part: [name for name in keywords if name in part]) or error
    if match := re.search(r"Unknown format: (\S+)", error):
        named = match.group(1)
        unknown = lambda part: ["format"] if part.get("format") == named else []
        return _at(schema, f"{named!r} is not supported", unknown) or error
    if "oneOf constraints are not supported" in error:
        what = "not supported where more than one of its schemas may hold; say anyOf"
        return _at(schema, what, lambda part: ["oneOf"] if "oneOf" in part else []) or error
    if match := re.search(r"Resource '(.*?)' is not present", error):
        refers = lambda part: ["$ref"] if str(part.get("$ref", "")).split("#")[0] else []
        place = _at(schema, "", refers).split(":")[0] or "$ref"
        return f"{place}: {match.group(1)} is not part of the schema, and nothing is fetched"
    if re.search(r"row has \d+ items; max is", error):
        return "too many properties or alternatives may come at one place; list more properties in required"
    faults = [
        f"{_place(path, keyword, name)}: {problem}"
        for path, part in subschemas(schema)
        for keyword, name, problem in _faults(part)
    ]
    return "; ".join(faults[:8]) or error


def relaxed(schema: Any) -> tuple[Any, tuple[str, ...]]:
    """Removes the keywords that llguidance cannot compile even in lenient mode, such as a pattern with look-around, and
    those that are null.

    Returns the schema and the removed keywords with their places. Without llguidance, the schema is unchanged."""
    return _relaxed(schema, "#", left_out := []), tuple(left_out)


def _relaxed(schema: Any, path: str, left_out: list[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    kept = dict(schema)
    for keyword, name, problem in _faults(schema):
        left_out.append(f"{_place(path, keyword, name)}: {problem}")
        if name is not None:
            kept[keyword] = {other: child for other, child in kept[keyword].items() if other != name}
        else:
            kept.pop(keyword)
        if keyword == "patternProperties":  # its properties are then unconstrained
            kept["additionalProperties"] = True
    for keyword, value in kept.items():
        if keyword in MAPS and isinstance(value, dict):
            kept[keyword] = {
                name: _relaxed(child, _place(path, keyword, name), left_out) for name, child in value.items()
            }
        elif keyword in (*LISTS, "items") and isinstance(value, list):
            kept[keyword] = [
                _relaxed(child, f"{path}/{keyword}/{index}", left_out) for index, child in enumerate(value)
            ]
        elif keyword in SINGLE:
            kept[keyword] = _relaxed(value, f"{path}/{keyword}", left_out)
    return kept


def _faults(schema: dict[str, Any]) -> Iterator[tuple[str, str | None, str]]:
    """Yields the keywords of a schema that cannot be compiled, the name within `patternProperties`, and the reason."""
    for keyword, value in schema.items():
        if value is None and keyword in ASSERTIONS - {"const"}:
            yield keyword, None, "null is no value for it"
        elif keyword in _ALONE and (problem := _problem(keyword, json.dumps(value))):
            yield keyword, None, problem
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        problems = {name: _problem("patternProperties", json.dumps({name: {}})) for name in patterns}
        yield from (("patternProperties", name, problem) for name, problem in problems.items() if problem)
        together = {name: {} for name, problem in problems.items() if not problem}
        if problem := _problem("patternProperties", json.dumps(together)):
            yield "patternProperties", None, problem


@functools.lru_cache(maxsize=4096)
def _problem(keyword: str, value: str) -> str:
    """Returns the reason why a keyword with this JSON value cannot be compiled; "" if it can, or if llguidance is
    missing."""
    schema = {"x-guidance": {"lenient": True}, **simplified({keyword: json.loads(value)})}
    try:
        error = problem_of(json.dumps({"grammars": [{"json_schema": schema}]}))
    except ModuleNotFoundError:
        return ""
    lines = [line.removeprefix("error: ") for line in error.splitlines() if not line.startswith((" ", "regex parse"))]
    return lines[0][:200] if lines else error[:200]


def _at(schema: dict[str, Any], what: str, find: Callable[[dict[str, Any]], list[str]]) -> str:
    """Returns `what`, preceded by the places of all keywords that `find` returns for the schemas within `schema`."""
    places = [f"{path}/{pointer_part(keyword)}" for path, part in subschemas(schema) for keyword in find(part)]
    return f"{', '.join(places[:8])}: {what}" if places else ""


def _place(path: str, keyword: str, name: str | None) -> str:
    return f"{path}/{keyword}" if name is None else f"{path}/{keyword}/{pointer_part(name)}"
