"""Tools and reasoning as OpenAI's and Anthropic's clients read them: streamed and whole, on the bundled model."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("anthropic")
pytest.importorskip("openai")
import anthropic
import openai

from pace.llm.chat.events import ArgumentsPiece, CallBegins, CallEnds, Event, Text, Thought
from pace.server.answers import Finish, Piece
from pace.server.schemas.messages import MessagesRequest
from pace.server.schemas.responses import ResponsesRequest
from pace.server.wire.messages import MessagesForm
from pace.server.wire.openai import Envelope
from pace.server.wire.responses import ResponsesForm
from tests.server.wire.scripted import events, stream, usage

ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather in a city", "parameters": SCHEMA}
NESTED = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "other"}}]
FLAT = [{"type": "function", **FUNCTION}, {"type": "function", "name": "other"}]
OTHER = {"name": "other", "input_schema": {"type": "object", "properties": {}}}
THEIRS = [{"name": "get_weather", "description": "The weather in a city", "input_schema": SCHEMA}, OTHER]
ROME = {"city": "Rome"}


@pytest.fixture
def client(serving) -> Any:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="k", max_retries=0)


@pytest.fixture
def claude(serving) -> Any:
    return anthropic.Anthropic(base_url=serving.url, api_key="k", max_retries=0)


def chat(client: Any, stream: bool, **fields: Any) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """Returns a choice and its calls."""
    body = {"model": "tiny", "messages": ASKED, "tools": NESTED, "temperature": 0, "max_tokens": 60} | fields
    if stream:
        with client.chat.completions.stream(**body) as received:
            received.until_done()
            choice = received.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**body).choices[0]
    calls = [call.function for call in choice.message.tool_calls or ()]
    return choice, [(call.name, json.loads(call.arguments)) for call in calls]


def respond(client: Any, stream: bool, **fields: Any) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """Returns a response and its calls."""
    body = {"model": "tiny", "input": ASKED, "tools": FLAT, "temperature": 0, "max_output_tokens": 60} | fields
    if stream:
        with client.responses.stream(**body) as received:
            response = received.get_final_response()
    else:
        response = client.responses.create(**body)
    calls = [item for item in response.output if item.type == "function_call"]
    return response, [(call.name, json.loads(call.arguments)) for call in calls]


def write(client: Any, stream: bool, **fields: Any) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """Returns a message and its calls."""
    body = {"model": "tiny", "messages": ASKED, "tools": THEIRS, "max_tokens": 60} | fields
    body["extra_body"] = {"temperature": 0}  # not an argument in newer versions of the client
    if stream:
        with client.messages.stream(**body) as received:
            message = received.get_final_message()
    else:
        message = client.messages.create(**body)
    calls = [block for block in message.content if block.type == "tool_use"]
    return message, [(call.name, call.input) for call in calls]


STREAMED = pytest.mark.parametrize("stream", [False, True])


@STREAMED
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"),
     ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)  # fmt: skip
def test_chat_calls(client, stream, choice, reason):
    answer, calls = chat(client, stream, tool_choice=choice, parallel_tool_calls=False)
    assert calls == [("get_weather", ROME)] and answer.finish_reason == reason and not answer.message.content
    assert answer.message.tool_calls[0].id.startswith("call_")


@STREAMED
def test_chat_calls_what_it_must_and_nothing_where_it_may_not(client, stream):
    answer, calls = chat(client, stream, tool_choice={"type": "function", "function": {"name": "other"}})
    assert [name for name, _ in calls] == ["other"] and answer.finish_reason == "stop"
    answer, calls = chat(client, stream, tool_choice="none")
    assert not calls and answer.finish_reason in ("stop", "length")


def test_chat_choices_have_calls_of_their_own_and_log_probabilities(client):
    body = {"model": "tiny", "messages": ASKED, "tools": NESTED, "tool_choice": "required", "max_tokens": 120}
    body |= {"n": 2, "seed": 1, "logprobs": True, "top_logprobs": 1, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**body)
    arguments, logprobs = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                arguments[choice.index] += call.function.arguments
            logprobs[choice.index] += [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
    for choice in whole.choices:
        assert len(choice.message.tool_calls) == 1 and json.loads(choice.message.tool_calls[0].function.arguments)
        assert arguments[choice.index] == choice.message.tool_calls[0].function.arguments
        assert logprobs[choice.index] == [entry.logprob for entry in choice.logprobs.content]
    assert sum(map(len, logprobs.values())) in range(
        whole.usage.completion_tokens - 2, whole.usage.completion_tokens + 1
    )


@STREAMED
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "get_weather"}])
def test_responses_call(client, stream, choice):
    response, calls = respond(client, stream, tool_choice=choice, parallel_tool_calls=False)
    assert calls == [("get_weather", ROME)] and response.status == "completed"
    assert [item.status for item in response.output] == ["completed"] and response.tools[0].name == "get_weather"
    response, calls = respond(client, stream, tool_choice="none")
    assert not calls and [item.type for item in response.output] == ["message"]


def test_the_events_of_a_call_of_a_response(client):
    body = {"model": "tiny", "input": ASKED, "tools": FLAT, "temperature": 0, "stream": True}
    received = list(client.responses.create(**body))
    names = [event.type.removeprefix("response.") for event in received]
    assert names[:3] == ["created", "in_progress", "output_item.added"]
    assert names[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert set(names[3:-3]) == {"function_call_arguments.delta"}
    assert "".join(event.delta for event in received[3:-3]) == received[-3].arguments
    assert {event.item_id for event in received[3:-2]} == {received[2].item.id}
    assert [event.sequence_number for event in received] == list(range(len(received)))


@STREAMED
@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_messages_call(claude, stream, choice):
    message, calls = write(claude, stream, tool_choice={**choice, "disable_parallel_tool_use": True})
    assert calls == [("get_weather", ROME)] and message.stop_reason == "tool_use" and len(message.content) == 1
    message, calls = write(claude, stream, tool_choice={"type": "none"})
    assert not calls and message.content[0].type == "text" and message.stop_reason != "tool_use"


def test_a_conversation_goes_on_with_what_tools_returned(serving, client, claude):
    """The prompt is the same in every API."""
    answer, _ = chat(client, False)
    call = answer.message.tool_calls[0]
    result = "It is sunny in Rome, 21 degrees."
    told = [*ASKED, answer.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    body = {"model": "tiny", "tools": NESTED, "temperature": 0, "max_tokens": 40}
    ours = client.chat.completions.create(**body, messages=told)

    response, _ = respond(client, False)
    output = {"type": "function_call_output", "call_id": response.output[0].call_id, "output": result}
    again, calls = respond(client, False, input=[*ASKED, *response.output, output], max_output_tokens=40)
    assert again.output_text == (ours.choices[0].message.content or "")
    assert again.usage.input_tokens == ours.usage.prompt_tokens and bool(calls) == bool(
        ours.choices[0].message.tool_calls
    )

    message, _ = write(claude, False)
    block = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": result}
    turns = [*ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": [block]}]
    final, _ = write(claude, False, messages=turns, max_tokens=40)
    assert "".join(part.text for part in final.content if part.type == "text") == again.output_text
    counted = claude.messages.count_tokens(model="tiny", messages=turns, tools=THEIRS).input_tokens
    assert counted == final.usage.input_tokens + final.usage.cache_read_input_tokens


def test_tools_are_counted(claude, client):
    plain = claude.messages.count_tokens(model="tiny", messages=ASKED).input_tokens
    assert claude.messages.count_tokens(model="tiny", messages=ASKED, tools=THEIRS).input_tokens > plain
    ours = client.responses.input_tokens.count(model="tiny", input=ASKED, tools=FLAT).input_tokens
    assert ours > client.responses.input_tokens.count(model="tiny", input=ASKED).input_tokens == plain


# -- forms, scripted: what the bundled model does not generate ---------------------------------------------------------

TURN: list[Event] = [
    Thought("Rome, "), Thought("then."), Text("Let me "), Text("see."),
    CallBegins(0, "call_a", "f"), ArgumentsPiece(0, '{"a": '), ArgumentsPiece(0, "1}"), CallEnds(0),
    CallBegins(1, "call_b", "g"), ArgumentsPiece(1, "{}"), CallEnds(1), Text("Done."),
]  # fmt: skip
CALLED = Finish("tool_calls")


def pieces_of(turn: list[Event], finish: Finish) -> list[Piece]:
    """Puts each event in a separate piece."""
    pieces = [Piece(0, event.text if isinstance(event, Text) else "", events=[event]) for event in turn]
    return [*pieces, Piece(0, "", finish=finish)]


def one_piece(turn: list[Event], finish: Finish) -> Piece:
    return Piece(0, "".join(event.text for event in turn if isinstance(event, Text)), finish=finish, events=turn)


def responses_form() -> ResponsesForm:
    request = ResponsesRequest.model_validate({"input": "hi", "tools": FLAT})
    return ResponsesForm(request, Envelope("tiny", "fp_0", "resp_1", 0), None)


def messages_form() -> MessagesForm:
    request = MessagesRequest.model_validate({"max_tokens": 5, "messages": ASKED})
    return MessagesForm(request, Envelope("tiny", "fp_0", "msg_1", 0), None)


def without_ids(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]


def test_items_of_a_response_come_one_after_the_other():
    received = events(stream(responses_form(), pieces_of(TURN, CALLED)))
    added = [event for name, event in received if name == "response.output_item.added"]
    done = [event for name, event in received if name == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == list(range(5))
    kinds = ["reasoning", "message", "function_call", "function_call", "message"]
    assert [event["item"]["type"] for event in added] == [event["item"]["type"] for event in done] == kinds
    end = received[-1][1]["response"]
    assert [event["item"] for event in done] == end["output"] and end["status"] == "completed"
    assert end["output"][0]["content"] == [{"type": "reasoning_text", "text": "Rome, then."}]
    whole = responses_form().whole([one_piece(TURN, CALLED)], usage(13))
    assert without_ids(whole) == without_ids(end)
    openai.types.responses.Response.model_validate(whole)


def test_blocks_of_a_message_neither_repeat_nor_skip():
    received = events(stream(messages_form(), pieces_of(TURN, CALLED)))
    starts = [event for name, event in received if name == "content_block_start"]
    stops = [event["index"] for name, event in received if name == "content_block_stop"]
    assert [event["index"] for event in starts] == stops == list(range(5))
    open_block = None
    for name, event in received:
        if name == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        elif name in ("content_block_delta", "content_block_stop"):
            assert event["index"] == open_block
            open_block = None if name == "content_block_stop" else open_block
    whole = messages_form().whole([one_piece(TURN, CALLED)], usage(13))
    assert whole["stop_reason"] == received[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert whole["content"][0]["thinking"] == "Rome, then." and whole["content"][2]["input"] == {"a": 1}
    anthropic.types.Message.model_validate(whole)


def test_a_call_that_was_cut_is_never_done():
    turn, finish = [CallBegins(0, "call_a", "f"), ArgumentsPiece(0, '{"a": "b')], Finish("length")
    received = events(stream(responses_form(), pieces_of(turn, finish)))
    names = [name for name, _ in received]
    assert "response.function_call_arguments.done" not in names and names[-1] == "response.incomplete"
    assert received[-1][1]["response"]["output"][0]["status"] == "incomplete"
    message = messages_form().whole([one_piece(turn, finish)], usage(1))
    assert message["content"] == [] and message["stop_reason"] == "max_tokens"
    names = [name for name, _ in events(stream(messages_form(), pieces_of(turn, finish)))]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "9" * 5000])
def test_arguments_that_python_cannot_read(value):
    """Only messages need them as an object, and leave such a call out."""
    turn = [CallBegins(0, "call_a", "f"), ArgumentsPiece(0, f'{{"a": {value}}}'), CallEnds(0)]
    message = messages_form().whole([one_piece(turn, CALLED)], usage(1))
    assert message["content"] == [] and message["stop_reason"] == "end_turn"
    received = events(stream(messages_form(), pieces_of(turn, CALLED)))
    assert received[-2][1]["delta"]["stop_reason"] == "end_turn"
    response = responses_form().whole([one_piece(turn, CALLED)], usage(1))
    assert response["output"][0]["arguments"] == f'{{"a": {value}}}'
