"""Converts `response_format`, as in OpenAI's API and similar ones, to a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pace.grammar.grammar import Grammar
from pace.grammar.limits import DEFAULT_LIMITS, GrammarLimits
from pace.grammar.structural_tag import read_structural_tag

_TYPES = ("text", "json_object", "json_schema", "structural_tag")


def read_response_format(
    value: Any, limits: GrammarLimits = DEFAULT_LIMITS, whitespace: str = "flexible"
) -> Grammar | None:
    """Returns the grammar of `{"type": ...}`; None for text.

    "json_schema" has `schema` and `strict` in the member `json_schema`, or directly (OpenAI's responses, llama.cpp).
    Without `strict`, keywords that cannot be enforced are ignored. "json_object" may have a `schema` (llama.cpp), which
    is enforced in full. `whitespace` of the JSON is as in `Grammar.json_schema`.
    Raises TypeError, ValueError.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f'response_format must be a dict with a "type", got {value!r:.100}')
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return Grammar.json_schema(
            {"type": "object"} if schema is None else schema, whitespace=whitespace, limits=limits
        )
    if kind == "json_schema":
        return _read_json_schema(value, limits, whitespace)
    if kind == "structural_tag":
        return read_structural_tag(value, limits, whitespace)
    raise ValueError(f"response_format.type must be one of {', '.join(_TYPES)}; got {kind!r:.100}")


def _read_json_schema(value: Mapping[str, Any], limits: GrammarLimits, whitespace: str) -> Grammar:
    named = value.get("json_schema", value)
    if not isinstance(named, Mapping):
        raise TypeError(f"response_format.json_schema must be a dict, got {named!r:.100}")
    schema = named.get("schema", value.get("schema"))
    if schema is None:
        raise ValueError("response_format.json_schema.schema is missing: it says what the JSON must look like")
    strict = named.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise TypeError(f"response_format.json_schema.strict must be true or false, got {strict!r:.100}")
    return Grammar.json_schema(schema, strict=bool(strict), whitespace=whitespace, limits=limits)
