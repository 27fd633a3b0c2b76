"""Gemma 4's turns: thoughts in a channel, and calls whose values have no JSON quotes."""

from __future__ import annotations

import copy
import json

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("transformers")

from transformers import PreTrainedTokenizerFast

from pace.assets import TINY
from pace.llm.chat import FORMATS, Tool, ToolCall, ToolChoice, TurnParser, turn_grammar
from pace.llm.chat.reasoning import GEMMA_THOUGHT
from pace.llm.chat.template import ChatTemplate
from pace.llm.chat.turn import plan_turn
from tests.llm.chat.grammars import accepts, special_names, vocabulary
from tests.llm.chat.turns import parse

GEMMA4 = FORMATS["gemma4"]
Q = '<|"|>'
ARGUMENT = (
    '{% macro show(x) %}{% if x is string %}<|"|>{{ x }}<|"|>{% elif x is boolean %}{{ x | tojson }}'
    "{% elif x is mapping %}{{ '{' }}{% for key, value in x | dictsort %}{{ key }}:{{ show(value) }}"
    "{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}{% elif x is sequence %}[{% for one in x %}{{ show(one) }}"
    "{{ '' if loop.last else ',' }}{% endfor %}]{% else %}{{ x }}{% endif %}{% endmacro %}"
)
TEMPLATE = (
    ARGUMENT + "<bos>{% if enable_thinking or tools %}<|turn>system{{ '\n' }}{{ '<|think|>\n' if enable_thinking }}"
    "{% for t in tools or [] %}<|tool>{{ t.function.name }}<tool|>{% endfor %}<turn|>{{ '\n' }}{% endif %}"
    "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|tool_response>response:{{ m.name }}{{ '{value:' + show(m.content) + '}' }}<tool_response|>"
    "{% else %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' if not ns.open }}"
    "{% if m.reasoning_content and m.tool_calls %}<|channel>thought{{ '\n' + m.reasoning_content + '\n' }}<channel|>"
    "{% endif %}{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name + '{' }}"
    "{% for key, value in c.function.arguments | dictsort %}{{ key }}:{{ show(value) }}{{ '' if loop.last else ',' }}"
    "{% endfor %}{{ '}' }}<tool_call|>{% endfor %}{{ m.content or '' }}"
    "{% if m.tool_calls %}{% set ns.open = true %}{% else %}{% set ns.open = false %}<turn|>{{ '\n' }}{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not ns.open %}<|turn>model{{ '\n' }}"
    "{{ '' if enable_thinking else '<|channel>thought\n<channel|>' }}{% endif %}"
)
"""In a few lines what the published template does: results come right after their calls, in the same turn."""
NAMES = ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
         "<tool_response|>", Q, "<|think|>", "<|tool>", "<tool|>", "<bos>"]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "Days": {"type": "integer"},
        "near": {"type": "boolean"},
        "unit": {"anyOf": [{"enum": ["C", "F", 1]}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 3},
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "an:odd key": {"$ref": "#/$defs/spot"}},
            "required": ["lat"],
        },
        "day": {"type": "string", "pattern": "^[a-z]+$"},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "any": {},
    },
    "required": ["city"],
    "$defs": {"spot": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
TOOLS = [Tool("weather", "The weather", SCHEMA), Tool("time", "The time")]
VALUES = [
    ({"city": "Rome"}, f"city:{Q}Rome{Q}"),
    ({"city": 'a "b",}\n', "Days": -3, "near": True}, f'city:{Q}a "b",}}\n{Q},Days:-3,near:true'),
    ({"city": "", "unit": None, "tags": []}, f"city:{Q}{Q},tags:[],unit:null"),
    ({"city": "é", "unit": "C", "tags": ["]", "a,b"]}, f"city:{Q}é{Q},tags:[{Q}]{Q},{Q}a,b{Q}],unit:{Q}C{Q}"),
    ({"city": "x", "unit": 1, "where": {"lat": 0.5}}, f"city:{Q}x{Q},unit:1,where:{{lat:0.5}}"),
    ({"city": "x", "where": {"lat": 1, "an:odd key": {"x": 2}}},
     f"city:{Q}x{Q},where:{{{Q}an:odd key{Q}:{{x:2}},lat:1}}"),
    ({"city": "x", "day": "monday", "map": {"b": 1, "a": 2}}, f'city:{Q}x{Q},day:"monday",map:{{a:2,b:1}}'),
    ({"city": "x", "any": {"k": [1, {"l": "m"}, None, False]}}, f"any:{{k:[1,{{l:{Q}m{Q}}},null,false]}},city:{Q}x{Q}"),
]  # fmt: skip


@pytest.mark.parametrize("specials", [True, False], ids=["tokens", "text"])
def test_values_are_written_allowed_and_read(specials):
    words = vocabulary(tuple(special_names(GEMMA4)) if specials else ())
    assert {"<|tool_call>", "<tool_call|>", Q} <= set(special_names(GEMMA4))
    grammar = turn_grammar(GEMMA4, TOOLS, ToolChoice("required"), special=words.special)
    for values, expected in VALUES:
        text = GEMMA4.write([ToolCall("1", "weather", "")], {"weather": TOOLS[0]}, [values])
        assert text == f"<|tool_call>call:weather{{{expected}}}<tool_call|>"
        assert accepts(grammar, words, words.encode(text)), text
        whole = parse(TurnParser(GEMMA4, TOOLS), text)
        assert json.loads(whole.calls[0][1]) == values and whole.ended == [0]
        assert parse(TurnParser(GEMMA4, TOOLS), text, range(len(text))).calls == whole.calls


@pytest.mark.parametrize(
    "arguments",
    [f"city:{Q}Rome{Q},Days:x", "city:Rome", f"Days:1,city:{Q}a{Q},Days:2", f"city:{Q}a{Q},tags:[{Q}{Q}]",
     f"city:{Q}a{Q},tags:[{Q}a{Q},{Q}a{Q},{Q}a{Q},{Q}a{Q}]", f"city:{Q}a{Q},where:{{}}", f"city:{Q}a{Q},zz:1",
     f'city:{Q}a{Q},day:"A"', f"city:{Q}a{Q},map:{{a:{Q}b{Q}}}", "near:true"],
)  # fmt: skip
def test_what_the_schema_forbids(arguments):
    words = vocabulary(tuple(special_names(GEMMA4)))
    grammar = turn_grammar(GEMMA4, TOOLS, ToolChoice("required"), special=words.special)
    assert not accepts(grammar, words, words.encode(f"<|tool_call>call:weather{{{arguments}}}<tool_call|>"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "a"}'[1:-1], {"city": "a"}), (f"{Q}city{Q}: {Q}a{Q}, Days: 2", {"city": "a", "Days": 2}),
        ("near:True,unit:None", {"near": True, "unit": None}), ("x:{y:[[],{}]}", {"x": {"y": [[], {}]}}),
        ("", {}), ("a:-1.5e3", {"a": -1500.0}), (f"a b:{Q}<|{Q}", {"a b": "<|"}),
    ],
)  # fmt: skip
def test_other_spellings(arguments, expected):
    text = f"I look.<|tool_call>call:weather{{{arguments}}}<tool_call|>"
    for cuts in ((), range(len(text))):
        whole = parse(TurnParser(GEMMA4, TOOLS), text, cuts)
        assert (whole.text, whole.ended) == ("I look.", [0]) and json.loads(whole.calls[0][1]) == expected


@pytest.mark.parametrize("arguments", ["a", "a:", "a:x", "a:1,", "a:[1}", "a:1 b:2", "{}", "a:01", f"a:{Q}x"])
def test_malformed_arguments_have_no_end(arguments):
    whole = parse(TurnParser(GEMMA4, TOOLS), f"<|tool_call>call:weather{{{arguments}}}<tool_call|> Hm.")
    assert whole.ended == [] and len(whole.calls) == 1


@pytest.fixture(scope="module")
def template():
    tokenizer = copy.deepcopy(PreTrainedTokenizerFast.from_pretrained(TINY))
    tokenizer.add_special_tokens({"additional_special_tokens": NAMES})
    tokenizer.chat_template = TEMPLATE
    return ChatTemplate(tokenizer)


ASKED = {"role": "user", "content": "Weather?"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "Days": 3}'}}
SAID = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALLED]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "Fine."}
ROME = f"<|tool_call>call:weather{{city:{Q}Rome{Q},Days:3}}<tool_call|>"
THINKS = {"enable_thinking": True}


def test_a_turn_that_thinks_calls_and_answers(template):
    assert template.format is GEMMA4 and template.reasoning == GEMMA_THOUGHT
    turn = plan_turn(template, [ASKED], TOOLS, variables=THINKS)
    assert turn.prompt.endswith("<|turn>model\n") and not turn.reasoning.begun
    shown = set(
        template.tokenizer.convert_tokens_to_ids(["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", Q])
    )
    assert not shown & turn.hidden and template.tokenizer.convert_tokens_to_ids("<turn|>") in turn.hidden
    whole = parse(turn.parser(), f"<|channel>thought\nHm.\n<channel|>{ROME}{ROME}")
    assert whole.thought == "Hm." and not whole.text and whole.ended == [0, 1]
    assert [json.loads(arguments) for _, arguments in whole.calls] == [{"city": "Rome", "Days": 3}] * 2
    later = plan_turn(template, [ASKED, SAID, RESULT], TOOLS, variables=THINKS).prompt
    answer = f"<|channel>thought\nHm.\n<channel|>{ROME}"
    assert later == f"{turn.prompt}{answer}<|tool_response>response:weather{{value:{Q}Fine.{Q}}}<tool_response|>"


def test_thoughts_that_are_turned_off(template):
    turn = plan_turn(template, [ASKED])
    assert turn.prompt.endswith("<|turn>model\n<|channel>thought\n<channel|>") and turn.is_plain
    turn = plan_turn(template, [ASKED], TOOLS)
    assert turn.reasoning is None and parse(turn.parser(), f"Well.{ROME}").text == "Well."


def test_a_thought_and_a_call_in_the_grammar(template):
    words = vocabulary(tuple(NAMES))
    turn = plan_turn(template, [ASKED], TOOLS, ToolChoice("required"), variables=THINKS)
    grammar = turn_grammar(GEMMA4, TOOLS, ToolChoice("required"), True, turn.reasoning, words.special)
    for text in (ROME, ROME + ROME, f"<|channel>thought\nHm, call:f{{\n<channel|>{ROME}"):
        assert accepts(grammar, words, words.encode(text)), text
    assert not accepts(grammar, words, words.encode("<|channel>thought\nHm.\n<channel|>Well."))
