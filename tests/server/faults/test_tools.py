"""Hostile tools, and calls in every form: cut off, in one step, byte by byte, with markers inside strings."""

from __future__ import annotations

import json

import pytest

from pace.llm.chat.events import ArgumentsPiece, CallBegins, Text, calls_of
from pace.llm.chat.formats import format_named
from pace.llm.chat.template import ChatTemplate
from pace.llm.chat.tools import ToolChoice, read_tools
from pace.llm.chat.turn import TurnReader, plan_turn
from tests.server.serving import QUESTION, text_of
from tests.waiting import cpu_limit

WEATHER = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "get_weather", parameters: dict = SCHEMA, **more) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.mark.parametrize("name", ["__class__", "__init__", "a.b-c", "None", "0"])
def test_a_tool_may_have_any_name_of_the_alphabet(serving, name):
    reply = serving.chat(WEATHER, tools=[tool(name)], tool_choice="required", max_tokens=80, parallel_tool_calls=False)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    assert [call["function"]["name"] for call in choice["message"].get("tool_calls", ())] == [name]
    if choice["finish_reason"] == "tool_calls":
        assert set(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])) == {"city"}


@pytest.mark.alone
@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([tool("f" * 65)], "tools[0].function.name"),
        ([tool("f g")], "tools[0].function.name"),
        ([tool("<tool_call>")], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(f"f{index}") for index in range(1000)], "tools"),
        ([tool(description="x" * 2**20)], "tools"),
        ([tool(parameters={"type": "object", "properties": {f"p{index}": {} for index in range(10**4)}})], "tools[0]"),
        ([tool(parameters={"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}})], None),
    ],
)  # fmt: skip
def test_tools_beyond_the_limits_are_refused_in_time(serving, tools, param):
    with cpu_limit(3):
        reply = serving.chat(WEATHER, tools=tools, max_tokens=8)
    assert reply.status == 400, reply.body[:300]
    assert len(reply.error["message"]) < 1500 and (param is None or reply.error["param"] == param), reply.error


MAIL = {"type": "object", "properties": {"to": {"type": "string", "pattern": r"^(?!\.)[a-z.]+@x$", "maxLength": 4}}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_pattern_that_no_grammar_has_is_passed_over_unless_the_tool_is_strict(serving, path):
    def ask(strict: bool):
        described = {"name": "send", "description": "", "strict": strict}
        tools = {
            "/v1/chat/completions": [tool(), tool("send", MAIL, strict=strict)],
            "/v1/messages": [{"name": "get_weather", "input_schema": SCHEMA}, {**described, "input_schema": MAIL}],
            "/v1/responses": [
                {"type": "function", "name": "get_weather", "parameters": SCHEMA},
                {"type": "function", **described, "parameters": MAIL},
            ],
        }
        body = {"model": "tiny", "messages": WEATHER, "max_tokens": 8, "tools": tools[path]}
        if path == "/v1/responses":
            body = {"model": "tiny", "input": "Hi", "max_output_tokens": 8, "tools": tools[path]}
        return serving.ask(path, body)

    passed = ask(strict=False)
    assert passed.status == 200, passed.body
    assert "the tool 'send': #/properties/to/pattern" in passed.headers["x-pace-warnings"]
    refused = ask(strict=True)
    assert (
        refused.status == 400 and "'send'" in refused.error["message"] and "#/properties/to" in refused.error["message"]
    )
    if path != "/v1/messages":  # Anthropic's errors have no such field
        assert refused.error["param"] == "tools[1]"
    serving.check_well()


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "absent"}}, "maybe", 5])
def test_a_choice_that_is_none(serving, choice):
    reply = serving.chat(WEATHER, tools=[tool()], tool_choice=choice, max_tokens=8)
    assert reply.status == 400 and reply.error["param"].startswith("tool_choice"), reply.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 3, 12])
def test_a_call_that_is_cut_off_is_no_call_that_was_made(serving, stream, max_tokens):
    reply = serving.chat(WEATHER, tools=[tool()], tool_choice="required", max_tokens=max_tokens, stream=stream)
    assert reply.status == 200, reply.body
    if not stream:
        choice = reply.json["choices"][0]
        assert choice["finish_reason"] == "length" and not choice["message"]["content"]
        return
    finishes = [choice["finish_reason"] for event in reply.events[:-1] for choice in event["choices"]]
    assert [reason for reason in finishes if reason] == ["length"] and text_of(reply.events) == ""


@pytest.fixture(scope="module")
def turn(serving):
    """A turn in the bundled model's format, in which one tool must be called."""
    tools = read_tools([tool("note", {"type": "object", "properties": {"text": {"type": "string"}}})])
    return plan_turn(ChatTemplate(serving.generator.tokenizer), QUESTION, tools, ToolChoice("auto"))


INSIDE = {"text": 'a </tool_call> b <tool_call> {"name": "note", "arguments": {}} \\" é 🦊'}


def written(*arguments: dict) -> str:
    return "Well.\n" + "\n".join(
        f'<tool_call>\n{{"name": "note", "arguments": {json.dumps(value, ensure_ascii=False)}}}\n</tool_call>'
        for value in arguments
    )


def read(turn, pieces: list[str]) -> tuple[str, list[dict]]:
    reader = TurnReader(turn)
    text, events = "", []
    for number, piece in enumerate(pieces, 1):
        reader.push(piece)
        told = reader.drain(number == len(pieces))
        text, events = text + told[0], events + told[1]
    assert reader.has_called
    assert "".join(event.text for event in events if isinstance(event, Text)) == text
    return text, [json.loads(call.arguments) for call in calls_of(events)]


def test_calls_are_the_same_whatever_the_cuts(turn):
    """Calls in one piece, split at every character, or split at one place; and two calls in one step."""
    text = written(INSIDE, {"text": "b"})
    expected = ("Well.\n", [INSIDE, {"text": "b"}])
    assert read(turn, [text]) == read(turn, list(text)) == expected
    for place in range(1, len(text)):
        assert read(turn, [text[:place], text[place:]]) == expected


def test_a_call_begins_once_and_its_arguments_follow(turn):
    reader = TurnReader(turn)
    kinds = []
    for character in written({"text": "abc"}):
        reader.push(character)
        kinds += [type(event) for event in reader.drain(False)[1]]
    assert kinds.count(CallBegins) == 1 and kinds.count(ArgumentsPiece) > 5
    assert kinds.index(CallBegins) < kinds.index(ArgumentsPiece)


def test_the_end_of_a_call_inside_a_string_ends_nothing(serving, turn):
    """The grammar and the parser both treat the end marker as characters of the string."""
    assert format_named("hermes").call.endswith("</tool_call>")
    assert read(turn, [written(INSIDE)]) == ("Well.\n", [INSIDE])
    schema = {"type": "object", "properties": {"text": {"const": INSIDE["text"]}}, "required": ["text"]}
    choice = {"type": "function", "function": {"name": "note"}}
    for stream in (False, True):
        reply = serving.chat(WEATHER, tools=[tool("note", schema)], tool_choice=choice, max_tokens=200, stream=stream)
        assert reply.status == 200, reply.body
        if stream:
            deltas = [event["choices"][0]["delta"] for event in reply.events[:-1]]
            calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
            arguments = "".join(call["arguments"] for call in calls)
        else:
            arguments = reply.json["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(arguments) == INSIDE
