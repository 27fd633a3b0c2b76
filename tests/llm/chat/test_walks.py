"""Random tokens that a grammar allows are parsed into a turn with valid calls of the given tools."""

from __future__ import annotations

import json
import random
import re

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

import jsonschema

from pace.llm.chat import FORMATS, Reasoning, ToolChoice, TurnParser, turn_grammar
from tests.llm.chat.grammars import (
    FORMAT_NAMES,
    PLAIN,
    accepts,
    call_of,
    random_object,
    random_tools,
    special_names,
    vocabulary,
    walk,
)
from tests.llm.chat.turns import parse

MOST = 250
THINK = Reasoning("<think>", "</think>")


def check(turn, tools, ended, text):
    """Asserts that calls name given tools, that complete ones are valid, and that an ended turn has no open call."""
    by_name = {tool.name: tool for tool in tools}
    for index, (name, arguments) in enumerate(turn.calls):
        assert name in by_name, text
        if index in turn.ended:
            jsonschema.validate(json.loads(arguments), by_name[name].parameters)
    if ended:
        assert turn.ended == list(range(len(turn.calls))), text


def beginning(format, tool, spelled):
    """Returns the shortest turn that is certainly a call of `tool`. With `spelled` it is written in another way:
    without a special token, or with more whitespace."""
    trigger = format.trigger.replace("$NAME", tool.name)
    if not spelled or format.answers_are_marked:
        return trigger
    return trigger[0] + PLAIN + trigger[1:] if format.anywhere else " \n" + trigger.replace(": ", ":  ")


@pytest.mark.parametrize("specials", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_walks(name, specials):
    format = FORMATS[name]
    words = vocabulary(tuple(special_names(format)) if specials else ())
    finished = 0
    for mode in ("required", "named", "auto"):
        for seed in range(4 if mode == "auto" else 2):
            rng = random.Random(f"{name} {specials} {mode} {seed}")
            tools = random_tools(rng)
            choice = ToolChoice(mode, (tools[0].name,) if mode == "named" else None)
            grammar = turn_grammar(format, tools, choice, parallel=seed % 2 == 0, special=words.special)
            begin = beginning(format, tools[0], seed >= 2) if mode == "auto" else ""
            text, ended = walk(grammar, words, rng, MOST, begin)
            turn = parse(TurnParser(format, tools), text)
            check(turn, tools, ended, text)
            if mode == "named":
                assert {call for call, _ in turn.calls} <= {tools[0].name}
            if ended:
                finished += 1
                assert turn.calls and (mode == "auto" and format.anywhere or not turn.text), text
                assert seed % 2 == 0 or len(turn.calls) == 1, text
    assert finished >= 4, "most walks were cut: they show little"


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "harmony", "pythonic"])
def test_walks_through_free_text(name):
    """Turns of random text contain no invalid call."""
    format = FORMATS[name]
    words = vocabulary(tuple(special_names(format)))
    for seed in range(5):
        rng = random.Random(f"{name} {seed}")
        tools = random_tools(rng)
        grammar = turn_grammar(format, tools, ToolChoice("auto"), special=words.special)
        text, ended = walk(grammar, words, rng, 60)
        turn = parse(TurnParser(format, tools), text)
        check(turn, tools, ended, text)


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("name", ["hermes", "generic", "qwen_coder"])
def test_walks_after_a_thought(name, begun):
    """A thought contains a trigger, and a call follows the thought."""
    format = FORMATS[name]
    reasoning = Reasoning(THINK.opening, THINK.closing, begun)
    words = vocabulary((*special_names(format), "<think>", "</think>"))
    for seed in range(3):
        rng = random.Random(f"{name} {begun} {seed}")
        tools = random_tools(rng)
        grammar = turn_grammar(format, tools, ToolChoice("required"), True, reasoning, words.special)
        thought = f"I could <tool_{PLAIN}call> {{ now"
        begin = ("" if begun else "<think>") + thought + "</think>"
        text, ended = walk(grammar, words, rng, MOST, begin)
        turn = parse(TurnParser(format, tools, reasoning), text)
        assert turn.thought == thought.replace(PLAIN, "") and not turn.text
        check(turn, tools, ended, text)


def damaged(text, rng):
    """Returns the text with pieces left out or doubled, or with whitespace or PLAIN added."""
    pieces = re.findall(r"\w+|\s+|[^\w\s]", text)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(pieces))
        pieces[at : at + 1] = rng.choice(
            [[], [pieces[at]] * 2, [" ", pieces[at]], [pieces[at], "\n"], [PLAIN, pieces[at]]]
        )
        pieces = pieces or [" "]
    return rng.choice(["", "", " ", "Hi "]) + "".join(pieces)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_damaged_calls(name):
    """If the grammar accepts a damaged call, the parser finds no invalid call in it."""
    format = FORMATS[name]
    words = vocabulary(tuple(special_names(format)))
    rng = random.Random(name)
    admitted = 0
    for _ in range(5):
        tools = random_tools(rng)
        values = random_object(tools[0].parameters, rng)
        text = format.write([call_of(format, tools[0].name)], {tools[0].name: tools[0]}, [values])
        grammar = turn_grammar(format, tools, ToolChoice("auto"), special=words.special)
        for _ in range(20):
            mine = damaged(text, rng)
            if accepts(grammar, words, words.encode(mine)):
                admitted += 1
                mine = mine.replace(PLAIN, "")
                check(parse(TurnParser(format, tools), mine), tools, True, mine)
    assert admitted, "nothing is shown"
