"""Unsupported keywords: the error names their place, or they are ignored if the schema is not strict."""

from __future__ import annotations

import json

import pytest

from pace.grammar import Grammar, GrammarError
from pace.grammar.response_format import read_response_format
from pace.grammar.support import relaxed
from tests.grammar.compiling import compiler, takes

pytest.importorskip("llguidance")

ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
PATTERNS = {
    "look-ahead": ZOD_EMAIL, "look-behind": "(?<=a)b", "negative look-behind": "(?<!a)b", "reference": r"(a)\1",
    "word": r"\bword\b", "control": r"\cJ", "empty class": "[^]", "unclosed": "(a",
}  # fmt: skip
INSIDE = {
    "#/pattern": lambda part: part,
    "#/properties/mail/pattern": lambda part: {"type": "object", "properties": {"mail": part}, "required": ["mail"]},
    "#/properties/a~1b/items/pattern": lambda part: {"properties": {"a/b": {"type": "array", "items": part}}},
    "#/anyOf/1/pattern": lambda part: {"anyOf": [{"type": "null"}, part]},
    "#/allOf/0/pattern": lambda part: {"type": "string", "allOf": [part]},
    "#/$defs/mail/pattern": lambda part: {"$defs": {"mail": part}, "properties": {"to": {"$ref": "#/$defs/mail"}}},
    "#/additionalProperties/pattern": lambda part: {"type": "object", "additionalProperties": part},
    "#/prefixItems/0/pattern": lambda part: {"type": "array", "prefixItems": [part]},
}
"""Place of the pattern -> function that puts a schema into a larger one."""


@pytest.mark.parametrize("kind", PATTERNS)
def test_a_strict_schema_is_refused_with_the_place_of_its_pattern(kind: str) -> None:
    for place, put in INSIDE.items():
        schema = put({"type": "string", "pattern": PATTERNS[kind]})
        with pytest.raises(GrammarError) as caught:
            compiler().compile(Grammar.json_schema(schema))
        assert f"{place}: " in str(caught.value) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize("kind", PATTERNS)
def test_a_lenient_schema_loses_its_pattern_and_nothing_else(kind: str) -> None:
    for place, put in INSIDE.items():
        schema = put({"type": "string", "pattern": PATTERNS[kind], "maxLength": 5})
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        grammar = read_response_format(form)
        compiler().compile(grammar)
        assert len(grammar.left_out) == 1 and grammar.left_out[0].startswith(f"{place}: ")
        assert grammar == Grammar.json_schema(put({"type": "string", "maxLength": 5}), strict=False)
        assert schema == put({"type": "string", "pattern": PATTERNS[kind], "maxLength": 5}), "the caller's stays"


def test_what_a_lenient_schema_keeps_is_enforced() -> None:
    parts = {
        "mail": {"type": "string", "pattern": "(?=a)", "maxLength": 3},
        "code": {"type": "string", "pattern": "^[0-9]$"},
    }
    schema = {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
    grammar = Grammar.json_schema(schema, strict=False)
    assert takes(grammar, '{"mail": "b.c", "code": "1"}')
    assert not takes(grammar, '{"mail": "b.cd", "code": "1"}') and not takes(grammar, '{"mail": "b", "code": "x"}')


def test_names_of_properties_may_have_patterns() -> None:
    bad = {"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}, "^n": {"type": "integer"}}}
    with pytest.raises(GrammarError, match=r"#/patternProperties/\^\(\?!x\): look-around"):
        compiler().compile(Grammar.json_schema(bad | {"additionalProperties": False}))
    grammar = Grammar.json_schema(bad | {"additionalProperties": False}, strict=False)
    assert takes(grammar, '{"n": 1, "y": "a"}') and not takes(grammar, '{"n": "a"}')
    together = {"type": "object", "patternProperties": {"^a": {}, "^ab": {"type": "string"}}}
    assert takes(Grammar.json_schema(together, strict=False), '{"abc": 5}')
    with pytest.raises(GrammarError, match="#/patternProperties: "):
        compiler().compile(Grammar.json_schema(together))


@pytest.mark.parametrize("part", [{"type": "undefined"}, {"minLength": 1.5}, {"pattern": 5}, {"maxItems": "3"}])
def test_keywords_with_values_that_they_cannot_have(part) -> None:
    schema = {"type": "object", "properties": {"a": part, "b": {"type": "null"}}, "required": ["a", "b"]}
    with pytest.raises(GrammarError, match=f"#/properties/a/{next(iter(part))}: "):
        compiler().compile(Grammar.json_schema(schema))
    grammar = Grammar.json_schema(schema, strict=False)
    assert takes(grammar, '{"a": "x", "b": null}') and not takes(grammar, '{"a": "x", "b": 1}')


@pytest.mark.parametrize(
    "schema",
    [True, {}, {"properties": {"pattern": {"type": "string"}, "type": {"const": "(?=a)"}}},
     {"enum": [{"pattern": "("}]},
     {"type": "string", "format": "email", "pattern": r"^\S+@\w+\.[a-z]{2,}$"}, {"$ref": "#"},
     {"properties": {"a": {"not": {}}}, "patternProperties": {"^x": True}, "uniqueItems": True}],
)  # fmt: skip
def test_what_can_be_held_or_passed_over_stays(schema) -> None:
    assert relaxed(schema) == (schema, ())


def test_a_schema_of_a_structural_tag_is_named() -> None:
    tag = {"type": "json_schema", "json_schema": {"properties": {"a": {"pattern": "(?=a)"}}}}
    form = {"type": "structural_tag", "format": tag}
    with pytest.raises(GrammarError, match="structural tag cannot be used: #/properties/a/pattern: look-around"):
        compiler().compile(read_response_format(form))


def test_asking_once_is_enough() -> None:
    """Clients send the same tools with each request."""
    from pace.grammar import support

    schema = {"properties": {f"p{index}": {"type": "string", "description": f"{index}"} for index in range(2000)}}
    relaxed(schema)
    before = support._problem.cache_info().misses
    relaxed(json.loads(json.dumps(schema)))
    assert support._problem.cache_info().misses == before and before < 500


def test_keywords_that_are_null_are_left_out_and_named() -> None:
    part = {"type": "array", "items": None, "description": None, "default": None, "const": None}
    schema, left_out = relaxed({"properties": {"a": part}, "required": ["a"], "additionalProperties": None})
    kept = {"type": "array", "description": None, "default": None, "const": None}
    assert schema == {"properties": {"a": kept}, "required": ["a"]}
    assert left_out == tuple(
        f"#/{place}: null is no value for it" for place in ("additionalProperties", "properties/a/items")
    )
