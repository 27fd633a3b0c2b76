"""Calls that a model writes without the marks of its format, in a code block or bare, as Qwen2.5-Coder does."""

from __future__ import annotations

import json

import pytest

from pace.llm.chat import FORMATS, CallBegins, CallEnds, Text, ToolChoice, TurnParser, read_tools
from pace.llm.chat.events import ArgumentsPiece
from pace.llm.chat.turn import turn_after
from tests.llm.chat.turns import parse

CITY = {"type": "string", "minLength": 2}
TOOLS = read_tools(
    [
        {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1}, "unit": {"enum": ["C", "F"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
        {"name": "weather_now", "parameters": {"type": "object", "properties": {"near": {"$ref": "#/$defs/p"}},
         "$defs": {"p": CITY}}},
        {"name": "now"},
    ]
)  # fmt: skip
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
OSLO = '{\n  "name": "weather_now",\n  "arguments": {\n    "near": "O}```slo"\n  }\n}'
NOW = '{"name":"now","arguments":{}}'
READ = {ROME: ["weather", {"city": "Rome"}], OSLO: ["weather_now", {"near": "O}```slo"}], NOW: ["now", {}]}
MARKED = [name for name in FORMATS if FORMATS[name].answers_are_marked]
UNMARKED = [name for name in FORMATS if name not in MARKED]
SOME = ["hermes", "llama3", "generic", "mistral", "pythonic", "qwen_coder"]

WRAPPED = {
    "bare": "{}", "fenced": "```json\n{}\n```", "fence without a language": "```\n{}\n```",
    "one line": "```json {} ```",
    "tools": "<tools>\n{}\n</tools>", "tag in a fence": "```xml\n<tools>\n{}\n</tools>\n```",
    "xml": "<tool_call>{}</tool_call>",
    "function_call": "<function_call>\n{}\n</function_call>", "indented": "  ```json\n  {}\n  ```",
    "CRLF": "```json\r\n{}\r\n```",
}  # fmt: skip


def turn(name, text, every_cut=True, **options):
    """Parses the text, checks that cuts do not change the result, and returns the turn."""

    def parser():
        return TurnParser(FORMATS[name], TOOLS, None, "{}{}".format, **options)

    whole = parse(parser(), text)
    assert whole.ended == list(range(len(whole.calls)))
    for cuts in ([[k] for k in range(len(text))] if every_cut else []) + [range(len(text))]:
        assert parse(parser(), text, cuts) == whole, f"cut at {list(cuts)}"
    return whole


def calls(found):
    return [[name, json.loads(arguments)] for name, arguments in found.calls]


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("name", SOME)
def test_one_call(name, wrapped):
    for call in (ROME, OSLO, NOW) if name == "hermes" else (OSLO,):
        text = WRAPPED[wrapped].replace("{}", call, 1)
        if wrapped == "bare" and text.startswith(FORMATS[name].trigger):
            continue  # this is a proper call of the format
        if wrapped == "xml" and FORMATS[name].trigger == "<tool_call>" and call != OSLO:
            continue
        found = turn(name, text, every_cut=name == "hermes")
        assert calls(found) == [READ[call]] and found.text.strip() == ""
        said = turn(name, f"I look:\n{text}\nSo it is.", every_cut=name == "hermes")
        assert calls(said) == [READ[call]] and said.text.split() == ["I", "look:", "So", "it", "is."]
        assert calls(turn(name, f"{text} \n", every_cut=False)) == [READ[call]]


@pytest.mark.parametrize("name", UNMARKED)
def test_every_format_of_unmarked_answers(name):
    found = turn(name, f"I look.\n```json\n{ROME}\n```", every_cut=False)
    assert calls(found) == [READ[ROME]] and found.text == "I look.\n"


@pytest.mark.parametrize("name", MARKED)
def test_marked_answers_are_text(name):
    opening, closing = FORMATS[name].reply
    text = f"```json\n{ROME}\n```"
    assert turn(name, opening + text + closing, every_cut=False).text == text


@pytest.mark.parametrize(
    "text",
    [f"{ROME}\n{OSLO}\n{NOW}", f"{ROME}{OSLO}{NOW}", f"{ROME},\n{OSLO}, {NOW}", f"[{ROME}, {OSLO}, {NOW}]",
     f"[\n{ROME},\n{OSLO},\n{NOW}\n]", f"```json\n{ROME}\n{OSLO}\n{NOW}\n```", f"```json\n[{ROME}, {OSLO}, {NOW}]\n```",
     f"```json\n{ROME}\n```\n```json\n{OSLO}\n```\n\n{NOW}\n", f"<tools>\n{ROME}\n{OSLO}\n{NOW}\n</tools>",
     f"<tools>{ROME}</tools><tools>{OSLO}</tools>\n<tools>{NOW}</tools>",
     f"<tool_call>\n{ROME}\n</tool_call>\n{OSLO}\n<tool_call>\n{NOW}\n</tool_call>",
     f"{ROME}\n<tool_call>{OSLO}</tool_call>{NOW}",
     f"```json\n{ROME}\n{OSLO},\n{NOW}", f"{{{ROME}\n{{{OSLO}}}\n{{{NOW}"],
)  # fmt: skip
def test_several_calls(text):
    found = turn("hermes", text)
    assert calls(found) == [READ[ROME], READ[OSLO], READ[NOW]]
    assert found.text.strip() == "" and found.ids == ["weather0", "weather_now1", "now2"]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [('{"name": "weather", "parameters": {"city": "Rome"}}', {"city": "Rome"}),
     ('{"arguments": {"city": "Rome", "days": 2}, "name": "weather"}', {"city": "Rome", "days": 2}),
     ('{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}', {"city": "Rome"}),
     ('{"id": "call_1", "name": "weather", "arguments": {"city": "Rome"}}', {"city": "Rome"}),
     (r'{"name": "weather", "arguments": "{\"city\": \"Rome\"}"}', {"city": "Rome"}),
     ('{ "name" : "weather" ,\n"arguments" : { "unit" : "C", "city" : "Rome" } }', {"unit": "C", "city": "Rome"})],
)  # fmt: skip
def test_other_spellings(text, arguments):
    for whole in (text, f"```json\n{text}\n```", "{%s}" % text, "{%s" % text, "```json\n{ %s\n}\n```" % text):
        assert calls(turn("hermes", whole)) == [["weather", arguments]]


TEXTS = [
    "{{", "{{}}", "{{ name }}", "{{%s" % NOW, "{{%s}}}" % NOW,
    '{"name": "Rome", "arguments": {"city": "Rome"}}', '{"name": "weather_"', '{"name": "weather", "arguments": {}}',
    '{"name": "weather", "arguments": {"city": 5}}', '{"name": "weather", "arguments": {"city": "Rome", "day": 1}}',
    '{"name": "weather", "arguments": {"city": "Rome", "days": 0}}', '{"name": "weather", "arguments": ["Rome"]}',
    '{"name": "weather", "arguments": {"city": "Rome", "unit": "K"}}', '{"name": "weather", "arguments": "Rome"}',
    '{"name": "weather", "arguments": {"city": "Rome"}, "more": 1}', '{"name": "weather", "arguments": {"city": "Rome"',
    '{"name": "weather", "arguments": {"city": "Rome"}', '{"name": "weather"}', '{"arguments": {"city": "Rome"}}',
    '{"name": "weather", "name": "now", "arguments": {}}', '{"name": "weather", "arguments": {"city": Rome}}',
    '{"name": "weather_now", "arguments": {"near": "x"}}', "{}", "[]", "[1, 2]", "{", "[", "```", "``` json", "<tools",
    "<tools></tools>",
    '{"city": "Rome"}', "{% if %}", "[Rome](https://x.y)", "- {item}", "`weather`", "``", "<tool>weather</tool>",
    '{"name": "now", "arguments": {"a": NaN}}',
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_is_text(text):
    for name in ("hermes", "mistral") if len(text) < 30 else ("hermes",):
        for whole in (
            text,
            f"See:\n{text}\nNo.",
            f"```json\n{text}\n```\n",
            f"<tools>{text}</tools>",
            f"```json\n[{ROME}, {text}]```",
        ):
            found = turn(name, whole, every_cut=len(whole) < 60)
            assert (found.text, found.calls) == (whole, [])


@pytest.mark.parametrize(
    "text",
    [f"As in {ROME}", f"- {ROME}", f"`{ROME}`", f"a = ```json\n{ROME[1:]}", f"```python\n{ROME}\n```",
     f"```json\nSo: {ROME}\n```",
     f"```json\n{ROME}\nis a call.\n```"],
)  # fmt: skip
def test_calls_amid_text_are_text(text):
    found = turn("hermes", text)
    assert (found.text, found.calls) == (text, [])


def test_calls_after_other_blocks_of_code():
    text = f"```python\n{ROME}\n```\n{NOW}\n  ```\n  {NOW}\n```"
    found = turn("hermes", text)
    assert calls(found) == [READ[NOW], READ[NOW]] and found.text.strip() == f"```python\n{ROME}\n```"


def test_calls_inside_of_calls_are_arguments():
    arguments = json.dumps({"near": f"\n{ROME}\n```json\n{ROME}\n```"})
    found = turn("hermes", '<tool_call>\n{"name": "weather_now", "arguments": %s}\n</tool_call>' % arguments)
    assert found.calls == [["weather_now", arguments]]


def bare(name, **values):
    arguments = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={name}>\n{arguments}</function>"


HERE = bare("weather", city="Rome\n<b> </parameter", days=2)
"""A call without its outer tags."""
READ[HERE] = ["weather", {"city": "Rome\n<b> </parameter", "days": 2}]


@pytest.mark.parametrize("name", ["qwen_coder", pytest.param("seed", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "text", ["{}", "{}\n</tool_call>", "{}</tool_call>", "```xml\n{}\n```", "```xml\n{}\n{}\n```", "  {}\n \n", "{}{}",
             "{}\n</tool_call>\n{}", "{}\n<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>\n{}"],
)  # fmt: skip
def test_calls_without_their_outer_tags(name, text):
    tag, padding = FORMATS[name].trigger[1:], FORMATS[name].arguments.padding
    text = text.replace("tool_call>", tag)
    for call in (HERE, bare("now")):
        read = READ.get(call, ["now", {}])
        if not padding:
            call = call.replace(">\nRome", ">Rome").replace(">\n2", ">2").replace("\n</parameter>", "</parameter>")
        whole = text.replace("{}", call)
        every_cut = name == "qwen_coder" and len(whole) < 150
        found = turn(name, whole, every_cut)
        assert calls(found) == [read] * text.count("{}") and found.text.strip() == ""
        said = turn(name, f"I look:\n{whole}\nSo it is.", False)
        assert calls(said) == calls(found) and said.text.split() == ["I", "look:", "So", "it", "is."]


@pytest.mark.parametrize(
    "text",
    ["<function=", "<function=now", "<function=now>", "<function=now> is a tag", "<function=nowhere>\n</function>",
     f"As in {bare('now')}", f"```python\n{bare('now')}\n```", bare("weather"), bare("weather", city="R"),
     bare("weather", city="Rome", days=0), bare("weather", city="Rome", days="two"), bare("now")[:-1],
     "<function=weather>\n<parameter=city>\nRome\n", "<function=weather>\n<parameter=city",
     bare("weather", city="Rome", unit="K"), bare("now").replace(">", "> so", 1)],
)  # fmt: skip
def test_functions_that_are_no_calls_are_text(text):
    for whole in (text, f"See:\n{text}\nNo."):
        found = turn("qwen_coder", whole)
        assert (found.text, found.calls) == (whole, [])
    assert turn("hermes", bare("now"), every_cut=False).calls == []


def test_a_call_without_its_outer_tags_is_read_once(monkeypatch):
    """The arguments are not read again with each piece of text."""
    arguments, read = FORMATS["qwen_coder"].arguments, []
    begin = type(arguments).reader
    monkeypatch.setattr(type(arguments), "reader", lambda self, tool: read.append(tool.name) or begin(self, tool))
    assert calls(parse(TurnParser(FORMATS["qwen_coder"], TOOLS), HERE, range(len(HERE)))) == [READ[HERE]]
    assert read == ["weather"]


def test_text_is_held_back_only_while_it_may_be_a_call():
    def shown(*pieces):
        parser = TurnParser(FORMATS["hermes"], TOOLS, None, "{}{}".format)
        return [parser.push(piece) for piece in pieces]

    assert shown("See\n", '{"', "na", 'me": ', '"', "R") == [[Text("See\n")], [], [], [], [], [Text('{"name": "R')]]
    assert shown("``", "`", "js", "on\n", '{"city', " x") == [[], [], [], [], [Text('```json\n{"city')], [Text(" x")]]
    assert shown("```", "py", "thon\n", "{") == [[], [Text("```py")], [Text("thon\n")], [Text("{")]]
    assert shown("a {", ' "name": "weather') == [[Text("a {")], [Text(' "name": "weather')]]
    assert shown("<", "t", "h>") == [[], [], [Text("<th>")]]
    assert shown("[", "{", '"a', "b") == [[], [], [], [Text('[{"ab')]]
    begins = [CallBegins(0, "now0", "now"), ArgumentsPiece(0, "{}"), CallEnds(0)]
    assert shown(NOW[:-1], "}", "\n", "Yes.") == [[], begins, [], [Text("\nYes.")]]
    assert shown("```json\n", NOW, "\n", "```", "\n", "x") == [[], [], [], begins, [], [Text("\nx")]]
    assert shown('{"name": "weather", "arguments": {"city": "', "x" * 99, '"', "}", "]") == \
        [[], [], [], [], [Text('{"name": "weather", "arguments": {"city": "' + "x" * 99 + '"}]')]]  # fmt: skip


def test_no_more_calls_than_are_taken():
    assert turn("hermes", f"{ROME}\n{NOW}", max_untagged=0).text == f"{ROME}\n{NOW}"
    one = turn("hermes", f"{ROME}\n{NOW}", max_untagged=1)
    assert calls(one) == [READ[ROME]] and one.text.strip() == NOW
    assert not turn("hermes", f"```json\n{ROME}\n{NOW}\n```", max_untagged=1).calls
    tagged = turn("hermes", f"<tool_call>{ROME}</tool_call>\n{NOW}", max_untagged=1)
    assert calls(tagged) == [READ[ROME]] and tagged.text.strip() == NOW


def test_where_turns_take_them():
    """Untagged calls are read if calls are optional and the text is free."""
    pytest.importorskip("llguidance")
    from pace.grammar import Grammar

    class Manner:
        format, reasoning = FORMATS["hermes"], None

        class tokenizer:
            added_tokens_decoder, all_special_ids = {}, []

    def taken(choice=None, parallel=True, answer=None):
        return turn_after("", Manner, TOOLS, choice, parallel, answer).max_untagged

    assert taken() is None and taken(parallel=False) == 1
    assert taken(answer=Grammar.json()) == 0
    for choice in (ToolChoice("required"), ToolChoice("named", ("now",)), ToolChoice("none")):
        assert taken(choice) == 0
