"""Texts that structural tags admit, and texts that they do not."""

from __future__ import annotations

import functools

import pytest

from pace.assets import TINY
from pace.grammar.response_format import read_response_format
from pace.llm.constraints.grammars import GrammarCompiler
from pace.tokenizer.loading import load_tokenizer

RED = {"type": "object", "properties": {"red": {"type": "integer"}}, "required": ["red"], "additionalProperties": False}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
OLD = {"structures": [{"begin": "<f=g>", "schema": RED, "end": "</f>"}], "triggers": ["<f="]}
TAGS = [{"begin": "<a>", "content": NUMBER, "end": "</a>"}, {"begin": "<b>", "content": NUMBER, "end": "</b>"}]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "separator": ", ", "tags": [TAGS[0] | {"type": "tag"}]}


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer(TINY), 2048)


def admits(value: dict, text: str) -> bool:
    """True if the tag admits the text's tokens."""
    matcher = compiler().mask(read_response_format({"type": "structural_tag", **value}), [])._matcher.deep_copy()
    tokens = load_tokenizer(TINY).encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("value", "admitted", "refused"),
    [
        (OLD, ["", "free text", '<f=g>{"red":1}</f>', 'so: <f=g>{"red":1}</f> and <f=g>{"red":2}</f>.'],
         ["<f=h>", '<f=g>{"red":"x"}</f>', 'so <f=g>{"red":1}']),
        ({"format": TRIGGERED}, ["", "x > y", "a <a>1</a> b <b>2</b>"], ["a <c>", "<a>x</a>"]),
        ({"format": TRIGGERED | {"at_least_one": True}}, ["<a>1</a>", "well, <b>2</b>!"], ["", "free"]),
        ({"format": TRIGGERED | {"at_least_one": True, "stop_after_first": True}}, ["<a>1</a>", "so <b>1</b>"],
         ["", "<a>1</a> more"]),
        ({"format": SEPARATED}, ["", "<a>1</a>", "<a>1</a>, <a>2</a>"], ["<a>1</a>,", "x", "<a>1</a><a>2</a>"]),
        ({"format": SEPARATED | {"at_least_one": True}}, ["<a>1</a>, <a>2</a>"], [""]),
        ({"format": SEPARATED | {"at_least_one": True, "stop_after_first": True}}, ["<a>1</a>"], ["<a>1</a>, <a>2</a>"]),
        ({"format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": 'say "'}, {"type": "regex", "pattern": "[ab/]+"},
            {"type": "const_string", "value": '"\n'}]}}, ['say "ab/a"\n'], ['say ""\n', "say"]),
        ({"format": {"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "none"}]}}, ["12", "none"],
         ["nine", "1none"]),
        ({"format": {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}},
         ["<think>so\nit is</think>"], ["so", "<think>"]),
    ],
)  # fmt: skip
def test_texts(value: dict, admitted: list[str], refused: list[str]) -> None:
    assert [text for text in admitted if not admits(value, text)] == []
    assert [text for text in refused if admits(value, text)] == []
