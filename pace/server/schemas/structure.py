"""Constraints on the text, in the forms of all supported APIs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pace.grammar import Grammar, GrammarLimits
from pace.grammar.response_format import read_response_format
from pace.grammar.structural_tag import read_structural_tag
from pace.grammar.whitespace import whitespace_options
from pace.server.errors import ApiError, invalid, unsupported
from pace.server.jobs import GrammarReader, Structure
from pace.server.schemas.fields import Request


class StructuredRequest(Request):
    """Constraint fields of OpenAI, vLLM (old and new ones), llama.cpp, mistral.rs and SGLang."""

    UNUSED = frozenset(("guided_decoding_backend", "structured_outputs_backend"))  # there is one backend

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None

    def structure(self) -> Structure | None:
        """Returns the only constraint of the request. Clients may give it twice, in vLLM's old and new fields. Raises
        ApiError for two different ones, and for unsupported options."""
        whitespace = _whitespace(self.guided_whitespace_pattern, self.structured_outputs)
        found = [
            Structure(name, value, _READERS[name]) for name in _READERS if (value := getattr(self, name)) is not None
        ]
        found += _structured_outputs(self.structured_outputs)
        found = [structure for structure in found if not _is_text(structure)]
        found = found[:1] + [structure for structure in found[1:] if not _is_same(structure, found[0])]
        if len(found) > 1:
            names = " and ".join(structure.param for structure in found[:3])
            raise ApiError(400, f"{names} both constrain the text; give one", param=found[1].param)
        if whitespace is not None and not (found and _is_json(found[0])):
            message = f"{whitespace.param} applies only to JSON; request JSON, for example with response_format"
            raise ApiError(400, message, param=whitespace.param)
        if not found or whitespace is None:
            return found[0] if found else None
        return replace(found[0], whitespace=whitespace.pattern)


@dataclass(frozen=True)
class _Whitespace:
    param: str
    pattern: str


def _whitespace(guided: Any, outputs: Any) -> _Whitespace | None:
    """Returns the whitespace option of JSON, from vLLM's old field or the new ones."""
    found = [] if guided is None else [("guided_whitespace_pattern", guided)]
    if isinstance(outputs, Mapping):
        if outputs.get("whitespace_pattern") is not None:
            found.append(("structured_outputs.whitespace_pattern", outputs["whitespace_pattern"]))
        if outputs.get("disable_any_whitespace"):
            found.append(("structured_outputs.disable_any_whitespace", ""))
    for param, pattern in found:
        try:
            whitespace_options(pattern)
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None
        if pattern != found[0][1]:
            raise ApiError(400, f"{found[0][0]} and {param} differ; give one", param=param)
    return _Whitespace(*found[0]) if found else None


def _is_text(structure: Structure) -> bool:
    value = structure.value
    return structure.param == "response_format" and isinstance(value, Mapping) and value.get("type") == "text"


def _is_json(structure: Structure) -> bool:
    """True if it asks for JSON without fixing the whitespace."""
    if isinstance(structure.value, Mapping) and structure.reader is _grammar:
        return structure.value.get("type") == "json_schema"
    return structure.reader in (read_response_format, _schema, _json_object, _structural_tag)


def _is_same(one: Structure, other: Structure) -> bool:
    """Compares JSON text: member order matters, and 1 differs from true."""
    return one.reader is other.reader and json.dumps(one.value) == json.dumps(other.value)


def _schema(value: Any, limits: GrammarLimits, whitespace: str) -> Grammar:
    return Grammar.json_schema(value, whitespace=whitespace, limits=limits)


def _json_object(value: Any, limits: GrammarLimits, whitespace: str) -> Grammar:
    return Grammar.json(whitespace)


def _plain(make: Callable[..., Grammar]) -> GrammarReader:
    """Returns a reader for grammars that have no JSON."""
    return lambda value, limits, whitespace: make(value, limits=limits)


_regex, _choices = _plain(Grammar.regex), _plain(Grammar.choices)
_gbnf = _plain(Grammar.gbnf)
"""Reads SGLang's `ebnf`, which has the syntax of llama.cpp's grammars."""


def _grammar(value: Any, limits: GrammarLimits, whitespace: str) -> Grammar:
    """Reads GBNF, Lark or llguidance's JSON as text, or mistral.rs's object with a type and a value."""
    if not isinstance(value, Mapping):
        return Grammar.read(value, limits=limits)
    readers: dict[str, GrammarReader] = {
        "json_schema": _schema,
        "regex": _regex,
        "lark": _grammar,
        "llguidance": _grammar,
    }
    kind, body = value.get("type"), value.get("value")
    if not isinstance(kind, str) or kind not in readers or body is None:
        raise ValueError(f"an object must have a value, and a type among {', '.join(readers)}; got {kind!r:.100}")
    text = json.dumps(body) if kind == "llguidance" and isinstance(body, Mapping) else body
    return readers[kind](text, limits, whitespace)


def _structural_tag(value: Any, limits: GrammarLimits, whitespace: str) -> Grammar:
    """Reads an object, or its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise TypeError(f"a structural tag must be an object, got {value!r:.100}")
    return read_structural_tag(value, limits, whitespace)


_READERS: dict[str, GrammarReader] = {
    "response_format": read_response_format,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choices,
    "guided_grammar": _grammar,
    "grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _gbnf,
}
_OUTPUTS: dict[str, GrammarReader] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choices,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
"""Members of `structured_outputs`."""
_WHITESPACE = ("whitespace_pattern", "disable_any_whitespace")
"""Members of `structured_outputs` that set the whitespace of JSON, also for a constraint in another field."""


def _structured_outputs(value: Any) -> list[Structure]:
    if value is None:
        return []
    if not isinstance(value, dict):
        raise invalid("structured_outputs", f"must be an object, got {value!r:.100}")
    if value.get("disable_additional_properties"):
        raise unsupported(
            "structured_outputs.disable_additional_properties",
            "not supported; set additionalProperties: false in the schema",
        )
    found = [
        Structure(f"structured_outputs.{name}", value[name], reader)
        for name, reader in _OUTPUTS.items()
        if value.get(name) is not None and not (name == "json_object" and value[name] is False)
    ]
    if not found and all(value.get(name) is None for name in _WHITESPACE):
        raise invalid("structured_outputs", f"must have one of {', '.join(_OUTPUTS)}")
    return found
