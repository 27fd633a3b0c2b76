"""Values and schemas, compared with `jsonschema`."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

import jsonschema

from pace.grammar.validation import is_valid

VALUES = [
    None, True, False, 0, 1, 1.0, 1.5, -3, 10**30, "", "a", "ab", "abc", "1", "né\n", [], [1], [1, 1], [1, "a"],
    [[1], [1.0]], [True, 1], {}, {"a": 1}, {"a": "x", "b": 2}, {"a": None, "x1": "y"}, {"b": {"a": 1}},
    {"a": {"a": {"a": 1}}},
]  # fmt: skip
SCHEMAS = [
    True, False, {}, {"type": "string"}, {"type": ["integer", "null"]}, {"type": "number"}, {"type": "boolean"},
    {"const": 1}, {"enum": [1, "a", [1], None]}, {"const": True}, {"minimum": 1}, {"exclusiveMinimum": 1, "maximum": 5},
    {"multipleOf": 0.5}, {"multipleOf": 2}, {"minLength": 1, "maxLength": 2}, {"pattern": "b"}, {"pattern": "^a?b*$"},
    {"items": {"type": "integer"}}, {"prefixItems": [{"type": "integer"}], "items": False}, {"uniqueItems": True},
    {"minItems": 1, "maxItems": 1}, {"contains": {"type": "string"}}, {"contains": {"const": 1}, "minContains": 2},
    {"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}, {"additionalProperties": False},
    {"properties": {"a": True}, "additionalProperties": {"type": "integer"}}, {"propertyNames": {"maxLength": 1}},
    {"patternProperties": {"^x": {"type": "string"}}, "properties": {"a": {}}, "additionalProperties": False},
    {"minProperties": 1, "maxProperties": 1}, {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}}, {"anyOf": [{"type": "string"}, {"minimum": 1}]},
    {"oneOf": [{"type": "number"}, {"minimum": 1}]}, {"allOf": [{"type": "number"}, {"maximum": 1}]},
    {"not": {"type": "object"}}, {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "array"}},
    {"$ref": "#/$defs/t", "$defs": {
        "t": {"type": "object", "additionalProperties": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/t"}]}}}},
    {"$ref": "#/properties/a~1b", "properties": {"a/b": {"type": "array"}}},
]  # fmt: skip


def test_as_jsonschema_says():
    for value, schema in itertools.product(VALUES, SCHEMAS):
        expected = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert is_valid(value, schema) == expected, f"{value!r} and {schema}"
        nested = {"type": "object", "properties": {"v": {"items": schema}}} if "$ref" not in str(schema) else True
        expected = jsonschema.Draft202012Validator(nested).is_valid({"v": [value]})
        assert is_valid({"v": [value]}, nested) == expected, f"{value!r} and {schema}, nested"


def test_lists_as_they_were_before_2020():
    schema = {"items": [{"type": "integer"}], "additionalItems": {"type": "string"}}
    for value in ([], [1], [1, "a"], ["a"], [1, 2]):
        assert is_valid(value, schema) == jsonschema.Draft7Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "http://x/y"}, {"type": "person"}, {"minimum": "a"}, 5]
)
def test_a_schema_that_is_none_takes_nothing(schema):
    assert not is_valid(1, schema)


def test_patterns_take_no_time_and_unknown_ones_say_nothing():
    assert not is_valid("a" * 5000 + "!", {"pattern": "^(a+)+$"}) and is_valid("a" * 5000, {"pattern": "^(a+)+$"})
    assert is_valid("x", {"pattern": "(?=a)b"})
