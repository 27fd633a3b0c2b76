"""Tools whose schema no grammar can enforce. The schema is relaxed, or an error names the tool if it is strict."""

from __future__ import annotations

import json
import logging

import pytest

from pace.assets import TINY
from pace.grammar import Grammar, GrammarError
from pace.llm import SamplingConfig
from pace.llm.chat import FORMATS, ToolCall, read_choice, read_tools
from pace.llm.chat.template import ChatTemplate
from pace.llm.chat.turn import Turn, plan_turn
from pace.llm.constraints.builder import ConstraintBuilder, _warn_once
from pace.tokenizer.loading import load_tokenizer
from tests.llm.chat.turns import parse

pytest.importorskip("llguidance")

PATTERNS = [r"^(?!\.)[a-z.]+@[a-z]+$", r"(a)\1", r"\bword\b", "(?<=a)b"]
PLAIN = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tools(pattern: str, **more) -> list[dict]:
    """Returns a tool with a pattern, between two other tools."""
    parts = {"to": {"type": "string", "pattern": pattern, "maxLength": 8}, "copies": {"type": "integer"}}
    mail = {"type": "object", "properties": parts, "required": list(parts)}
    return [
        {"name": "weather", "parameters": PLAIN, "strict": True},
        {"name": "send", "parameters": mail, **more},
        {"name": "time", "parameters": PLAIN},
    ]


def turn(items: list[dict], choice="required", format: str = "hermes", answer: Grammar | None = None) -> Turn:
    known = read_tools(items)
    template = ChatTemplate(load_tokenizer(TINY), FORMATS[format])
    return plan_turn(template, [{"role": "user", "content": "Hi"}], known, read_choice(choice, known), answer=answer)


@pytest.fixture(scope="module")
def constraints() -> ConstraintBuilder:
    return ConstraintBuilder(load_tokenizer(TINY), 2064)


def make(constraints: ConstraintBuilder, planned: Turn) -> tuple[str, ...]:
    return constraints.build(SamplingConfig(grammar=planned.grammar), [[1]], [7])[1]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "send"}])
def test_a_pattern_of_a_tool_that_is_not_strict_is_passed_over(constraints, pattern: str, choice) -> None:
    warnings = make(constraints, turn(tools(pattern), choice))
    assert len(warnings) == 1 and warnings[0].startswith("the tool 'send': #/properties/to/pattern: ")


@pytest.mark.parametrize("format", FORMATS)
def test_in_each_format_the_parser_reads_what_the_grammar_allows(constraints, format: str) -> None:
    """Formats that write strings without quotes also do so for a string whose pattern was dropped."""
    planned = turn(tools(PATTERNS[0])[1:2], format=format)
    values = {"to": "a.b", "copies": 2}
    call = ToolCall(planned.format.make_id("send", 0), "send", "")
    text = planned.format.write([call], {"send": planned.tools[0]}, [values])
    matcher = constraints.grammars.compile(planned.grammar).matcher.deep_copy()
    tokens = constraints.grammars.table.tokenize_str(text, parse_special=True)
    assert matcher.try_consume_tokens(tokens) == len(tokens), text
    parsed = parse(planned.parser(), text)
    assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == [("send", values)]


def test_it_is_logged_once(constraints, caplog) -> None:
    _warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "pace"):
        for _ in range(3):
            make(constraints, turn(tools("(?=once)")))
    (record,) = caplog.records
    assert "the tool 'send': #/properties/to/pattern" in record.getMessage()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("answer", [None, Grammar.json()])
def test_a_strict_tool_is_named(constraints, pattern: str, answer) -> None:
    with pytest.raises(
        GrammarError, match="the strict tool 'send' cannot be used: #/properties/to/pattern: "
    ) as caught:
        make(constraints, turn(tools(pattern, strict=True), "auto", answer=answer))
    assert caught.value.place == "tools[1]"


@pytest.mark.parametrize(
    ("part", "message"),
    [({"$ref": "http://example.com/x"}, "nothing is fetched"), ({"$ref": "#/$defs/nowhere"}, "nowhere"),
     ({"type": "string", "minLength": 5, "maxLength": 2}, "unsatisfiable"), ({"type": "array", "uniqueItems": True},
      None)],
)  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
def test_what_else_cannot_be_held_names_the_tool(constraints, part, message, strict) -> None:
    parameters = {"type": "object", "properties": {"a": part}, "required": ["a"]}
    items = [{"name": "weather", "parameters": PLAIN}, {"name": "odd", "parameters": parameters, "strict": strict}]
    if message is None and not strict:
        assert any("uniqueItems" in warning for warning in make(constraints, turn(items)))
        return
    with pytest.raises(GrammarError, match=f"tool 'odd' cannot be used: .*{message or '#/properties/a/uniqueItems'}"):
        make(constraints, turn(items))


def test_a_false_keyword_of_a_strict_tool_says_nothing(constraints) -> None:
    part = {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}
    parameters = {"type": "object", "properties": {"a": part}}
    assert make(constraints, turn([{"name": "odd", "parameters": parameters, "strict": True}])) == ()


REFERRING = {
    "type": "object",
    "properties": {
        "from": {"$ref": "#/$defs/place"},
        "to": {"$ref": "#/properties/from"},
        "stops": {"type": "array", "items": {"$ref": "#/properties/to"}, "maxItems": 2},
        "then": {"$ref": "#"},
    },
    "required": ["from", "to"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string", "enum": ["Rome", "Oslo"]}, "@whole": {"type": "null"}},
}
"""A schema like those that Zod writes: a repeated type is a reference to its first use."""
TRIPS = [
    ({"from": "Rome", "to": "Oslo"}, True),
    ({"from": "Rome", "to": "Oslo", "stops": ["Oslo", "Rome"], "then": {"from": "Oslo", "to": "Rome"}}, True),
    ({"from": "Rome", "to": "Lima"}, False),
    ({"from": "Rome", "to": "Oslo", "stops": ["Lima"]}, False),
    ({"from": "Rome", "to": "Oslo", "then": {"from": "Oslo"}}, False),
]


@pytest.mark.parametrize("format", FORMATS)
def test_references_to_other_places_of_a_schema(constraints, format: str) -> None:
    planned = turn([{"name": "go", "parameters": REFERRING}], format=format)
    compiled = constraints.grammars.compile(planned.grammar)
    for values, is_allowed in TRIPS:
        call = ToolCall(planned.format.make_id("go", 0), "go", "")
        text = planned.format.write([call], {"go": planned.tools[0]}, [values])
        tokens = constraints.grammars.table.tokenize_str(text, parse_special=True)
        taken = compiled.matcher.deep_copy().try_consume_tokens(tokens)
        assert (taken == len(tokens)) == is_allowed, text
        if is_allowed:
            (found,) = parse(planned.parser(), text).calls
            assert json.loads(found[1]) == values
