"""Validates a value against a JSON schema, for values that were not generated with a grammar."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pace.grammar.backend import import_llguidance

_TYPES = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}


def parse_json(text: str) -> Any:
    """`json.loads` without NaN and infinities, which JSON does not have. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def is_valid(value: Any, schema: Any) -> bool:
    """True if `value`, as returned by `json.loads`, matches the schema: a dict, or True or False.

    `format` is ignored, and so are unknown keywords and invalid patterns. References are resolved within the schema. A
    value never matches a reference to another document, or an endless one.
    """
    try:
        return _Schemas(schema).takes(value, schema)
    except (RecursionError, ArithmeticError, LookupError, TypeError, ValueError):  # an invalid schema
        return False


class _Schemas:
    def __init__(self, root: Any) -> None:
        self._root = root

    def takes(self, value: Any, schema: Any) -> bool:
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and not self.takes(value, self._at(schema["$ref"])):
            return False
        if "type" in schema and not _is_type(value, schema["type"]):
            return False
        if "const" in schema and not _same(value, schema["const"]):
            return False
        if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
            return False
        if not self._combined(value, schema):
            return False
        if isinstance(value, str):
            return _text(value, schema)
        if isinstance(value, list):
            return self._list(value, schema)
        if isinstance(value, dict):
            return self._object(value, schema)
        return isinstance(value, bool) or value is None or _number(value, schema)

    def _at(self, reference: str) -> Any:
        """Resolves a reference such as `#/$defs/city`."""
        place, _, path = reference.partition("#")
        if place:
            raise ValueError("a reference to elsewhere")
        found = self._root
        for name in path.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found[name]
        return found

    def _combined(self, value: Any, schema: Mapping[str, Any]) -> bool:
        if not all(self.takes(value, one) for one in schema.get("allOf", ())):
            return False
        if "anyOf" in schema and not any(self.takes(value, one) for one in schema["anyOf"]):
            return False
        if "oneOf" in schema and sum(self.takes(value, one) for one in schema["oneOf"]) != 1:
            return False
        if "not" in schema and self.takes(value, schema["not"]):
            return False
        if "if" in schema:
            branch = "then" if self.takes(value, schema["if"]) else "else"
            return self.takes(value, schema.get(branch, True))
        return True

    def _list(self, value: list[Any], schema: Mapping[str, Any]) -> bool:
        if not _within(len(value), schema, "minItems", "maxItems"):
            return False
        if schema.get("uniqueItems") and any(_same(a, b) for i, a in enumerate(value) for b in value[:i]):
            return False
        rest = schema.get("items", True)
        first = schema.get("prefixItems", ())
        if isinstance(rest, list):  # before draft 2020-12
            first, rest = rest, schema.get("additionalItems", True)
        if not all(self.takes(one, first[k] if k < len(first) else rest) for k, one in enumerate(value)):
            return False
        if "contains" not in schema:
            return True
        count = sum(self.takes(one, schema["contains"]) for one in value)
        return schema.get("minContains", 1) <= count <= schema.get("maxContains", math.inf)

    def _object(self, value: dict[str, Any], schema: Mapping[str, Any]) -> bool:
        if not _within(len(value), schema, "minProperties", "maxProperties"):
            return False
        needed = [*schema.get("required", ())]
        for name, others in schema.get("dependentRequired", {}).items():
            needed += others if name in value else ()
        if not all(name in value for name in needed):
            return False
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, one in value.items():
            own = [known[name]] if name in known else []
            own += [found for pattern, found in patterns.items() if _matches(name, pattern)]
            own = own or [schema.get("additionalProperties", True)]
            if not all(self.takes(one, found) for found in own):
                return False
        if not all(self.takes(name, schema.get("propertyNames", True)) for name in value):
            return False
        return all(self.takes(value, one) for name, one in schema.get("dependentSchemas", {}).items() if name in value)


def _is_type(value: Any, kinds: Any) -> bool:
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind in ("number", "integer"):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and (kind == "number" or value == int(value)):
                return True
        elif isinstance(value, _TYPES[kind]):
            return True
    return False


def _same(a: Any, b: Any) -> bool:
    """True if two values are equal in JSON, where 1 equals 1.0 but not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a == b


def _within(number: float, schema: Mapping[str, Any], least: str, most: str) -> bool:
    return schema.get(least, -math.inf) <= number <= schema.get(most, math.inf)


def _number(value: float, schema: Mapping[str, Any]) -> bool:
    if not _within(value, schema, "minimum", "maximum"):
        return False
    if not schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf):
        return False
    step = schema.get("multipleOf")
    return step is None or math.isclose(value / step, round(value / step), rel_tol=1e-9, abs_tol=1e-9)


def _text(value: str, schema: Mapping[str, Any]) -> bool:
    if not _within(len(value), schema, "minLength", "maxLength"):
        return False
    return "pattern" not in schema or _matches(value, schema["pattern"])


def _matches(text: str, pattern: str) -> bool:
    """True if a pattern matches somewhere in a text, or if llguidance rejects the pattern. Python's `re` is not used,
    because it may need exponential time."""
    matcher = _matcher(pattern)
    if matcher is None:
        return True
    matcher = matcher.deep_copy()
    return matcher.consume_tokens(list(json.dumps(text, ensure_ascii=False).encode())) and matcher.is_accepting()


@lru_cache(maxsize=64)
def _matcher(pattern: str) -> Any:
    try:
        llguidance = import_llguidance()
    except ModuleNotFoundError:
        return None
    grammar = json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": pattern}}]})
    found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    return None if found.is_error() else found
