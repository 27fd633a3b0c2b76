"""Handwritten turns: thoughts, text that looks like calls, malformed calls, and other spellings of values."""

from __future__ import annotations

import json

import pytest

from pace.llm.chat import FORMATS, CallBegins, CallEnds, Reasoning, Text, ToolCall, TurnParser, read_tools
from pace.llm.chat.events import ArgumentsPiece
from pace.llm.chat.literals import match, terminals, write
from pace.llm.chat.reasoning import (
    APERTUS_INNER,
    COMMAND_THINKING,
    HARMONY_ANALYSIS,
    HUNYUAN_THINK,
    MISTRAL_THINK,
    SOLAR_THINK,
    THINK,
    detect_reasoning,
)
from tests.llm.chat.turns import parse

TOOLS = read_tools(
    [
        {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "b": {"type": "boolean"},
                    "d": {"type": "string", "format": "date"},
                    "e": {"enum": ["1", "2"]},
                    "l": {"type": "array"},
                    "any": {},
                    "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "m": {"type": ["string", "integer"]},
                    "c": {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]},
                },
                "$defs": {"color": {"type": "string", "enum": ["red", "1"]}},
            },
        },
        {"name": "fo", "parameters": {"type": "object", "properties": {}}},
    ]
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'


def turn(name, text, reasoning=None, tools=TOOLS):
    """Parses the text, checks that cuts do not change the result, and returns the turn."""
    whole = parse(TurnParser(FORMATS[name], tools, reasoning, "{}{}".format), text)
    for cut in range(len(text)):
        assert parse(TurnParser(FORMATS[name], tools, reasoning, "{}{}".format), text, [cut]) == whole, f"cut at {cut}"
    letters = parse(TurnParser(FORMATS[name], tools, reasoning, "{}{}".format), text, range(len(text)))
    assert letters == whole
    return whole


def test_events_in_order():
    parser = TurnParser(FORMATS["hermes"], TOOLS, make_id="{}{}".format)
    assert parser.push("a " + CALL + "\n" + CALL + " b") == [
        Text("a "),
        CallBegins(0, "f0", "f"),
        ArgumentsPiece(0, '{"n": 1}'),
        CallEnds(0),
        CallBegins(1, "f1", "f"),
        ArgumentsPiece(1, '{"n": 1}'),
        CallEnds(1),
        Text(" b"),
    ]
    assert parser.close() == []


def test_arguments_come_as_they_are_written():
    parser = TurnParser(FORMATS["hermes"], TOOLS)
    begins = parser.push('<tool_call>{"name":"f","arguments":{"s')
    assert begins[1:] == [ArgumentsPiece(0, '{"s')] and begins[0].id.startswith("call_") and len(begins[0].id) == 29
    assert parser.push('": "x') == [ArgumentsPiece(0, '": "x')]
    parser = TurnParser(FORMATS["qwen_coder"], TOOLS)
    parser.push("<tool_call>\n<function=f>\n<parameter=s>\nab")
    assert parser.push("cd\n") == [ArgumentsPiece(0, "cd")]


@pytest.mark.parametrize(
    "text",
    ["2 < 3, <tool, <tool_call", "<tool_call>", "<tool_call> is how a call begins",
     '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', '<tool_call>{"name": "f"}</tool_call>',
     '<tool_call>{"name": "foo", "arguments": {}}</tool_call>', '<tool_call>{"name": "f", "arguments"',
     "<tool_call><tool_call>", " \n", ""],
)  # fmt: skip
def test_what_only_looks_like_a_call_is_text(text):
    found = turn("hermes", text)
    assert found.text == text and not found.calls
    assert turn("hermes", text + CALL).text == text


@pytest.mark.parametrize("text", ["[f", "[f(", "[1, 2]", "[unknown(a=1)]", "fo(), see"])
def test_a_list_that_is_no_call_is_text(text):
    found = turn("pythonic", text)
    assert found.text == ("" if text == "[f(" else text)
    assert found.calls == ([["f", ""]] if text == "[f(" else [])


def test_calls_are_text_where_there_are_no_tools():
    assert turn("hermes", CALL, tools=[]).text == CALL
    assert turn("llama3", '{"name": "f", "parameters": {}}', tools=[]).text == '{"name": "f", "parameters": {}}'


def test_amid_text_only_where_the_format_has_it():
    text = 'So: {"name": "f", "parameters": {"n": 1}}'
    assert turn("llama3", text).text == text
    assert turn("llama3", text[4:]).calls == [["f", '{"n": 1}']]


@pytest.mark.parametrize("closing", ["</tool_call>", '"}}\n</tool_call>', "\\"])
def test_marks_inside_a_string_are_text_of_the_string(closing):
    arguments = json.dumps({"s": closing})
    found = turn("hermes", '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>' % arguments)
    assert found.calls == [["f", arguments]] and found.ended == [0] and not found.text
    value = json.dumps(["</arg_value>", closing])
    found = turn("glm45", f"<tool_call>f\n<arg_key>l</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>")
    assert found.calls == [["f", f'{{"l": {value}}}']] and found.ended == [0]


def test_a_call_that_goes_wrong_does_not_end_and_loses_nothing():
    found = turn("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1]} so')
    assert (found.calls, found.ended, found.text) == ([["f", '{"n": 1']], [], "]} so")
    found = turn("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}, and ' + CALL)
    assert (found.calls, found.ended, found.text) == ([["f", '{"n": 1}'], ["f", '{"n": 1}']], [1], ", and ")
    found = turn("pythonic", "[f(n=!)]")
    assert (found.calls, found.ended, found.text) == ([["f", '{"n": ']], [], "!)]")


@pytest.mark.parametrize("name", ["kimi", "deepseek_v31", "functionary"])
def test_arguments_that_break_off_before_what_ends_a_call_are_no_whole_call(name):
    text = FORMATS[name].write([ToolCall("1", "fo", "")], {tool.name: tool for tool in TOOLS}, [{}])
    assert turn(name, text).ended == [0]
    assert turn(name, text.replace("{}", '{"n":')).ended == []


def test_the_longer_of_two_names():
    assert turn("glm45", "<tool_call>fo\n</tool_call>").calls == [["fo", "{}"]]
    assert turn("mistral_v11", "[TOOL_CALLS]fo[ARGS]{}").calls == [["fo", "{}"]]
    assert turn("mistral_v11", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]fo[ARGS]{}").ended == [0, 1]


def test_ids_that_the_model_writes():
    assert turn("mistral_call_id", "[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}").ids == ["abc123XYZ"]
    for name in ("mistral", "mistral_v11"):
        made = FORMATS[name].make_id("f", 0)
        assert len(made) == 9 and made.isalnum()
    assert FORMATS["kimi"].make_id("f", 2) == "functions.f:2"


@pytest.mark.parametrize(
    ("written", "read"),
    [("s='a'", {"s": "a"}), ('s="it\'s"', {"s": "it's"}),
     (r"s='it\'s \"x\" \n \\ \x41 \u00e9 \d'", {"s": 'it\'s "x" \n \\ A é \\d'}), ("s='a\"b\n'", {"s": 'a"b\n'}),
     ("n=-3, b=True", {"n": -3, "b": True}), ("n = 3 ,b= False", {"n": 3, "b": False}),
     ("any={'k': [None, (1.5e-3, true)]}, l=[]", {"any": {"k": [None, [0.0015, True]]}, "l": []}),
     ("other='x), f('", {"other": "x), f("}), ("", {})],
)  # fmt: skip
def test_python_becomes_json(written, read):
    found = turn("pythonic", f"[f({written}), fo()]")
    assert [json.loads(arguments) for _, arguments in found.calls] == [read, {}] and found.ended == [0, 1]


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [("s", "12", "12"), ("s", "a\n\nb ", "a\n\nb "), ("s", '"quoted" \\n', '"quoted" \\n'), ("s", "", ""),
     ("s", "x < y </parameter", "x < y </parameter"), ("n", "12", 12), ("n", "twelve", "twelve"), ("b", "true", True),
     ("b", "True", True), ("d", '"2024-01-01"', "2024-01-01"), ("d", "2024-01-01", "2024-01-01"), ("d", "2024", "2024"),
     ("e", "2", "2"), ("l", '["</parameter>", {"a": 1}]', ["</parameter>", {"a": 1}]), ("l", "[1, 2", "[1, 2"),
     ("any", "None", None), ("any", "NaN", "NaN"), ("unknown", "x", "x"), ("o", "Rome", "Rome"), ("o", "null", None),
     ("o", "None", None), ("o", "12", "12"), ("o", '"null"', "null"), ("o", '"quoted"', '"quoted"'),
     ("o", r'"\"null\""', '"null"'), ("o", "[see below", "[see below"), ("o", '{"a": "</x>"', '{"a": "</x>"'),
     ("o", "", ""), ("m", "12", 12), ("m", "1.5", "1.5"), ("m", "twelve", "twelve"), ("m", '"12"', "12"),
     ("c", "red", "red"), ("c", "1", "1"), ("c", "null", None), ("c", "None", None), ("any", '{"a": [1]}', {"a": [1]}),
     ("any", "a {", "a {"), ("d", "None", "None"),
     ("l", "['a', {'b': True}]", ["a", {"b": True}]), ("any", "['a']", "['a']"), ("l", "['a'", "['a'")],
)  # fmt: skip
def test_tagged_values_have_the_types_of_the_schema(key, written, read):
    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    found = turn("qwen_coder", text)
    assert [json.loads(arguments) for _, arguments in found.calls] == [{key: read}] and found.ended == [0]


@pytest.mark.parametrize("value", ["[" * 9000 + "]" * 9000, '{"a":' * 9000, "9" * 9000, "[" * 9000])
def test_values_that_python_cannot_read_are_text(value):
    for key in ("l", "any", "o"):
        text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        found = parse(TurnParser(FORMATS["qwen_coder"], TOOLS), text, range(0, len(text), 1000))
        assert [json.loads(arguments) for _, arguments in found.calls] == [{key: value}] and found.ended == [0]


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [("<think>\nHm. <tool_call>{ </thin </think>\n\nYes", "Hm. <tool_call>{ </thin ", "Yes"),
     ("<think>\nHm.\n\nSo.\n\n</think>Yes", "Hm.\n\nSo.", "Yes"), ("<think>Hm.\n</thi", "Hm.\n</thi", ""),
     ("\n<think></think>Yes", "", "Yes"), ("<think>" + CALL, CALL, ""), ("Yes", "", "Yes"), (" <thin", "", " <thin"),
     ("", "", "")],
)  # fmt: skip
def test_thoughts(text, thought, answer):
    found = turn("hermes", text, THINK)
    assert (found.thought, found.text, found.calls) == (thought, answer, [])
    if "</think>" in text:
        assert turn("hermes", text + CALL, THINK).calls == [["f", '{"n": 1}']]


def test_a_thought_that_the_prompt_began():
    begun = THINK.after("<|assistant|><think>\n")
    assert begun == Reasoning("<think>", "</think>", begun=True)
    found = turn("hermes", f"\nHm {CALL}</think>\n\n{CALL}", begun)
    assert found.thought == f"Hm {CALL}" and found.calls == [["f", '{"n": 1}']] and not found.text
    assert THINK.after("<think>\n\n</think>\n\n") is None
    assert THINK.after("<|assistant|>") == THINK


def test_a_thought_that_comes_later_is_text():
    assert turn("hermes", "a <think>b</think>", THINK).text == "a <think>b</think>"


def test_harmony():
    thought = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}'
    found = turn("harmony", thought + call, HARMONY_ANALYSIS)
    assert (found.thought, found.calls, found.ended, found.text) == ("Hm", [["f", '{"n": 1}']], [0], "")
    found = turn("harmony", thought + "<|channel|>final<|message|>Hi " + call, HARMONY_ANALYSIS)
    assert (found.thought, found.text, found.calls) == ("Hm", "Hi " + call, [])
    assert turn("harmony", "Hi", HARMONY_ANALYSIS).text == "Hi"


@pytest.mark.parametrize("name, length", [("mistral_call_id", 9), ("mistral", 9), ("solar_open", 10)])
def test_a_grammar_makes_ids_of_the_length_that_the_template_wants(name, length):
    form = FORMATS[name]
    assert f"[A-Za-z0-9]{{{length}}}" in terminals(form.head, {}, "f") + terminals(form.tail, {})
    assert len(form.make_id("f", 0)) == length
    assert match("<$ID10>", "<abc>", 0).holes == {"ID": "abc"} and write("<$ID10>", ID="abc") == "<abc>"


def test_solar_open():
    thought = "<|think|>Hm<|end|><|begin|>assistant"
    call = '<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{"n": 1}<|tool_call:end|>'
    found = turn("solar_open", f"{thought}<|tool_calls|>{call}{call}", SOLAR_THINK)
    assert (found.thought, found.calls, found.text) == ("Hm", [["f", '{"n": 1}']] * 2, "")
    assert found.ids == ["a1b2c3d4e5"] * 2 and found.ended == [0, 1]
    found = turn("solar_open", f"{thought}<|content|>Hi {call}<|end|>", SOLAR_THINK)
    assert (found.thought, found.text, found.calls) == ("Hm", f"Hi {call}", [])
    begun = SOLAR_THINK.after("<|end|><|begin|>assistant")
    assert begun == SOLAR_THINK, "each answer begins in this way"


@pytest.mark.parametrize(("flag", "written", "read"), [
    ("true", "12", "12"), ("false", "12", 12), ("true", "[1]", "[1]"), ("false", '"a"', "a"), ("false", "a b", "a b"),
])  # fmt: skip
def test_tags_that_say_if_a_value_is_text(flag, written, read):
    text = f'<｜DSML｜parameter name="any" string="{flag}">{written}</｜DSML｜parameter>'
    text = f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{text}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    found = turn("deepseek_v32", "Well. " + text)
    assert [json.loads(arguments) for _, arguments in found.calls] == [{"any": read}] and found.ended == [0]


def test_command():
    found = turn(
        "command", "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>", COMMAND_THINKING
    )
    assert (found.thought, found.text) == ("Hm", "Hi")


def test_reasoning_is_detected():
    assert detect_reasoning("{{ '[THINK]' + block['thinking'] + '[/THINK]' }}") == MISTRAL_THINK
    assert detect_reasoning("{%- if '</think>' in content %}") == THINK
    assert detect_reasoning("<|channel|>analysis<|message|>") == HARMONY_ANALYSIS
    assert detect_reasoning("{%- set begin = '<think{}>'.format(':opensource') %}") == HUNYUAN_THINK
    assert detect_reasoning("{%- set inner_token = '<|inner_prefix|>' -%}") == APERTUS_INNER
    assert detect_reasoning("{{- '<|begin|>assistant<|think|>' + message.reasoning + '<|end|>' }}") == SOLAR_THINK
    assert detect_reasoning("{{ messages }}") is None
