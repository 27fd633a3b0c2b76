"""Grammars are checked when they are created: malformed, too large or too deeply nested ones give errors in time."""

from __future__ import annotations

import contextlib
import json

import pytest

from pace.grammar import Grammar, GrammarLimits
from pace.grammar.limits import bracket_depth
from pace.grammar.response_format import read_response_format
from pace.grammar.whitespace import whitespace_options
from tests.waiting import cpu_limit

DEEP = 60_000


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Grammar.regex(5), TypeError, "regex must be a string"),
        (lambda: Grammar.regex("(" * DEEP + ")" * DEEP), ValueError, "60000 deep"),
        (lambda: Grammar.regex("[" * DEEP), ValueError, None),
        (lambda: Grammar.regex("a" * 300_000), ValueError, "300000 bytes"),
        (lambda: Grammar.regex("\ud800"), ValueError, "lone surrogate"),
        (lambda: Grammar.lark("start: " + "(" * DEEP + '"a"' + ")" * DEEP), ValueError, "60000 deep"),
        (lambda: Grammar.gbnf("root ::= " + "(" * DEEP + '"a"' + ")" * DEEP), ValueError, "60000 deep"),
        (lambda: Grammar.gbnf("root ::= nobody"), ValueError, "nobody"),
        (lambda: Grammar.gbnf('root ::= "a'), ValueError, "not a GBNF grammar"),
        (lambda: Grammar.gbnf("rule ::= " * 50), ValueError, "not a GBNF grammar"),
        (lambda: Grammar.choices("yes"), TypeError, "list of strings"),
        (lambda: Grammar.choices(["yes", 5]), TypeError, "each of the choices"),
        (lambda: Grammar.choices([]), ValueError, "at least one"),
        (lambda: Grammar.choices(["a", ""]), ValueError, "none of them empty"),
        (lambda: Grammar.choices([f"{index}" for index in range(10**5)]), ValueError, "100000 choices"),
        (lambda: Grammar.choices(["x" * 300_000]), ValueError, "bytes"),
        (lambda: Grammar.json_schema(5), TypeError, "JSON schema must be"),
        (lambda: Grammar.json_schema("{"), ValueError, "not valid JSON"),
        (lambda: Grammar.json_schema('{"minimum": NaN}'), ValueError, "NaN is not JSON"),
        (lambda: Grammar.json_schema("[" * DEEP), ValueError, "not valid JSON"),
        (lambda: Grammar.json_schema(False), ValueError, "allows nothing"),
        (lambda: Grammar.json_schema({"foo": "bar"}), ValueError, "'foo' is not a keyword"),
        (lambda: Grammar.json_schema({"minimum": float("nan")}), ValueError, "cannot be written as JSON"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), ValueError, "cannot be written as JSON"),
        (lambda: Grammar.json_schema({"const": "\ud800"}), ValueError, None),
        (lambda: Grammar.json_schema({"enum": ["x" * 100] * 10**4}), ValueError, "bytes"),
        (lambda: Grammar.json_schema({}, whitespace="lots"), ValueError, "flexible, compact, spaced"),
        (lambda: Grammar.read('{"grammar": 1}'), ValueError, '"grammars"'),
        (lambda: Grammar.read("{"), ValueError, '"grammars"'),
        (lambda: Grammar.read(json.dumps({"grammars": [{"lark_grammar": "start: " + "(" * 99}]})), ValueError, "deep"),
    ],
)
@pytest.mark.alone
def test_what_is_no_grammar(make, error: type[Exception], message: str | None) -> None:
    with cpu_limit(1, "a look at the largest text takes some 10 ms"):
        if message is None:  # harmless, or found by the compiler
            with contextlib.suppress(error):
                make()
        else:
            with pytest.raises(error, match=message) as caught:
                make()
            assert len(str(caught.value)) < 1000


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_the_size_of_a_schema_is_bounded() -> None:
    Grammar.json_schema(nested(63))
    with pytest.raises(ValueError, match="more than 64 schemas deep"):
        Grammar.json_schema(nested(64))
    with pytest.raises(ValueError, match="schemas deep"):
        Grammar.json_schema(nested(10_000))
    many = {"properties": {f"p{index}": {} for index in range(20)}}
    Grammar.json_schema(many, limits=GrammarLimits(max_schemas=21))
    with pytest.raises(ValueError, match="more than 20 schemas"):
        Grammar.json_schema(many, limits=GrammarLimits(max_schemas=20))


@pytest.mark.parametrize(
    ("text", "depth"),
    [("", 0), ("abc", 0), ("(a(b)c)", 2), ("()()", 1), ('start: "((((" x', 0), (r"\(\(", 0), ("[((]", 0), (r"[\](]", 0),
     ('"\\"((" (', 1), ("{{}}", 2), ("))((", 2), ('"(((', 0)],
)  # fmt: skip
def test_depth_of_brackets(text: str, depth: int) -> None:
    assert bracket_depth(text) == depth


@pytest.mark.alone
def test_a_long_text_takes_no_long_look() -> None:
    with cpu_limit(2, "a million brackets, looked at once each"):
        for text in ("[" * 250_000, '"' * 250_001, '["' * 125_000, "\\" * 250_000):
            bracket_depth(text)


def test_equal_grammars_are_equal() -> None:
    assert Grammar.choices(["a", "b"]) == Grammar.choices(("a", "b", "a"))
    assert Grammar.json_schema({"type": "object"}) == Grammar.json_schema('{"type": "object"}') == Grammar.json()
    assert Grammar.json_schema({}) != Grammar.json_schema({}, whitespace="spaced")


def test_a_pydantic_model() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):
        name: str

    assert Grammar.json_schema(Person) == Grammar.json_schema(Person.model_json_schema())


def test_a_text_says_its_language() -> None:
    assert Grammar.read('root ::= "a"').kind == "gbnf"
    assert Grammar.read('start: "a"').kind == "lark"
    assert Grammar.read('{"grammars": [{"lark_grammar": "start: /a/"}]}').kind == "llguidance"


def schema_of(grammar: Grammar) -> dict:
    return json.loads(grammar.source)["grammars"][0]["json_schema"]


def test_what_says_nothing_is_left_out_of_a_schema() -> None:
    schema = {
        "properties": {"a": {"uniqueItems": False, "x-guidance": {"lenient": True}, "then": {}, "minContains": 2}},
        "x-guidance": {"whitespace_flexible": True},
        "if": {"type": "string"},
    }
    assert schema_of(Grammar.json_schema(schema)) == {
        "properties": {"a": {}},
        "x-guidance": whitespace_options("flexible"),
    }
    assert schema["properties"]["a"]["uniqueItems"] is False, "what the caller gave stays as it was"


def test_a_name_of_a_property_is_no_keyword() -> None:
    schema = {"properties": {"x-guidance": {"type": "string"}, "then": {}, "format": {"format": "date"}}}
    prepared = schema_of(Grammar.json_schema(schema))["properties"]
    assert set(prepared) == {"x-guidance", "then", "format"} and "pattern" in prepared["format"]


def test_enum_and_const_stay_as_they_are() -> None:
    values = [{"x-guidance": 1, "uniqueItems": False, "pattern": "\\s"}]
    assert schema_of(Grammar.json_schema({"enum": values}))["enum"] == values


RED = {"type": "object", "properties": {"red": {"type": "integer"}}, "required": ["red"]}


def test_response_formats() -> None:
    assert read_response_format({"type": "text"}) is None
    assert read_response_format({"type": "json_object"}) == Grammar.json()
    assert read_response_format({"type": "json_object", "schema": RED}) == Grammar.json_schema(RED)
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": RED, "strict": True}}
    assert read_response_format(named) == Grammar.json_schema(RED)
    lenient = {"type": "json_schema", "json_schema": {"name": "n", "schema": RED}}
    assert read_response_format(lenient) == Grammar.json_schema(RED, strict=False)
    assert read_response_format({"type": "json_schema", "schema": RED}) == Grammar.json_schema(RED, strict=False)


TAG = {"begin": "<f=g>", "schema": RED, "end": "</f>"}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("json", TypeError, "must be a dict"),
        ({}, ValueError, "response_format.type"),
        ({"type": "yaml"}, ValueError, "'yaml'"),
        ({"type": "json_schema"}, ValueError, "response_format.json_schema.schema is missing"),
        ({"type": "json_schema", "json_schema": []}, TypeError, "response_format.json_schema must be"),
        ({"type": "json_schema", "json_schema": {"schema": RED, "strict": "yes"}}, TypeError, "strict must be"),
        ({"type": "structural_tag"}, TypeError, "structures must be a list"),
        ({"type": "structural_tag", "structures": [TAG], "triggers": ["<x"]}, ValueError, "none of the triggers"),
        ({"type": "structural_tag", "structures": [{}], "triggers": ["<"]}, ValueError, r"structures\[0\].begin"),
        ({"type": "structural_tag", "format": {"type": "nonsense"}}, ValueError, "format.type"),
        ({"type": "structural_tag", "format": {"type": "__init__"}}, ValueError, "format.type"),
        ({"type": "structural_tag", "format": {"type": "sequence", "elements": [5]}}, TypeError, r"elements\[0\]"),
    ],
)
def test_what_is_no_response_format(value, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_response_format(value)
