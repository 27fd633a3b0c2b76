"""Functions that a model calls: parsed from the text by pace or by kani, free or constrained by their schemas."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import pytest
from kani import AIParam, ChatMessage, ChatRole, Kani, ReasoningPart, ai_function
from kani.model_specific.qwen3 import Qwen3Parser
from kani.models import FunctionCall, ToolCall

from pace.integrations.kani.answers import Outcome, pieces_and_completion
from pace.integrations.kani.messages import as_message
from pace.llm import Metrics
from pace.llm.chat import ArgumentsPiece, CallBegins, CallEnds, Text, Thought
from tests.conformance.script import Script

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


class Weather(Kani):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.asked = []

    @ai_function()
    def get_weather(self, city: Annotated[str, AIParam(desc="Its name")]):
        """The weather in a city, now."""
        self.asked.append(city)
        return f"sunny, {20 + len(city)} degrees"


class Units(Kani):
    @ai_function()
    def get_weather(self, city: Literal["Oslo", "Lima"], unit: Literal["celsius", "kelvin"]):
        """The weather in a city, now."""
        return f"{city} {unit}"


async def collected(rounds):
    return [message async for message in rounds]


async def streamed(chat, question, **hyperparams):
    """The pieces of each stream of a round, and the round's messages."""
    found = []
    async for stream in chat.full_round_stream(question, **hyperparams):
        found.append(([piece async for piece in stream], await stream.message()))
    return found


async def shown(events, shows_thoughts=False, markers=()):
    """The pieces of text of these events in a stream."""

    async def source():
        for event in (*events, Outcome("stop", Metrics(*[0] * 13), None)):
            yield event

    return [piece async for piece in pieces_and_completion(source(), shows_thoughts, markers)][:-1]


@pytest.mark.parametrize("constrained", [False, True])
def test_a_function_is_called_and_its_result_told(make_engine, run, constrained):
    chat = Weather(make_engine(constrain_tool_calls=constrained))
    call, result, answer = run(collected(chat.full_round("What is the weather in Rome?")))
    (made,) = call.tool_calls
    assert call.text is None and made.function.kwargs == {"city": "Rome"} and chat.asked == ["Rome"]
    assert result.role is ChatRole.FUNCTION and result.tool_call_id == made.id and not result.is_tool_call_error
    assert answer.text == "It is 24 degrees." and answer.tool_calls is None
    assert call.extra["pace"]["finish_reason"] == "tool_calls"
    assert [message.tool_calls for message in run(collected(chat.full_round("What is the capital of Japan?")))] == [
        None
    ]


def test_a_stream_has_the_text_and_no_calls(engine, run):
    chat = Weather(engine)
    (called, call), (told, _), (pieces, answer) = run(streamed(chat, "What is the weather in Paris?"))
    assert called == [] and call.tool_calls[0].function.kwargs == {"city": "Paris"}
    assert told == ["sunny, 25 degrees"] and "".join(pieces) == answer.text == "It is 25 degrees."


def test_a_call_is_held_to_its_schema(make_engine, run):
    """The question asks for a city that the function's schema does not allow."""
    question = "What is the weather in Rome?"
    messages, functions = [ChatMessage.user(question)], list(Units(make_engine()).functions.values())
    (free,) = run(make_engine().predict(messages, functions)).message.tool_calls
    assert "unit" not in free.function.kwargs, "the weights do not do it of themselves"
    for engine in (make_engine(constrain_tool_calls=True), make_engine(tool_choice="required")):
        message = run(engine.predict(messages, functions)).message
        (made,), told = message.tool_calls, message.extra["pace"]
        assert told["forward_passes"] < told["completion_tokens"], "the grammar leaves no choice for some of them"
        arguments = made.function.kwargs
        assert arguments["city"] in ("Oslo", "Lima") and arguments["unit"] in ("celsius", "kelvin")


def test_a_choice_among_functions(engine, run):
    functions = list(Weather(engine).functions.values())
    story = [ChatMessage.user("Tell me a story about a dog.")]
    assert not run(engine.predict(story, functions, max_tokens=20)).message.tool_calls
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        assert run(engine.predict(story, functions, tool_choice=choice)).message.tool_calls
    question = [ChatMessage.user("What is the weather in Rome?")]
    assert not run(engine.predict(question, functions, tool_choice="none", max_tokens=20)).message.tool_calls
    with pytest.raises(ValueError, match="is not a tool of this request"):
        run(engine.predict(story, functions, tool_choice={"type": "function", "function": {"name": "other"}}))


def test_without_functions_a_choice_says_nothing(make_engine, run):
    chat = Weather(make_engine(tool_choice="required"))
    text = run(chat.chat_round_str("What is the capital of Japan?", include_functions=False))
    assert text == "The capital of Japan is Tokyo."


def test_functions_may_be_switched_off(engine, run):
    chat = Weather(engine)
    messages = run(collected(chat.full_round("What is the weather in Rome?", max_function_rounds=1)))
    assert sum(bool(message.tool_calls) for message in messages) == 1


def test_a_parser_of_kani_reads_the_same(make_engine, run):
    raw = make_engine(parser=None)
    functions = list(Weather(raw).functions.values())
    completion = run(raw.predict([ChatMessage.user("What is the weather in Rome?")], functions))
    assert completion.message.text == CALL and completion.message.tool_calls is None
    chat = Weather(Qwen3Parser(raw))
    (called, call), _, (pieces, answer) = run(streamed(chat, "What is the weather in Rome?"))
    assert called == [] and call.tool_calls[0].function.kwargs == {"city": "Rome"}
    assert "".join(pieces) == answer.text == "It is 24 degrees."


def test_special_tokens_stay_whole_where_a_stop_string_begins_like_one_ends(make_engine, run):
    raw = make_engine(parser=None, stop=["> and then", "l>nothing"])
    functions = list(Weather(raw).functions.values())

    async def pieces():
        stream = raw.stream([ChatMessage.user("What is the weather in Rome?")], functions)
        return [item async for item in stream][:-1]

    found = run(pieces())
    assert "".join(found) == CALL and len(found) > 5
    for marker in ("<tool_call>", "</tool_call>"):
        assert sum(marker in piece for piece in found) == 1


def test_markers_stay_whole_wherever_pieces_are_cut(run):
    text, markers = "a <b <tool_call>{<}</tool_call> <tool", ["<tool_call>", "</tool_call>"]
    for size in range(1, 14):
        pieces = run(shown([Text(text[start : start + size]) for start in range(0, len(text), size)], markers=markers))
        assert "".join(pieces) == text
        assert all(sum(marker in piece for piece in pieces) == 1 for marker in markers)


def test_special_tokens_are_shown_or_skipped(make_engine, run):
    raw = make_engine(parser=None)
    messages = [ChatMessage.user("What is the capital of Japan?")]
    bias = {5: 1000.0}  # <|assistant|>, a special token
    shown = run(raw.predict(messages, max_tokens=3, logit_bias=bias)).message.text
    skipped = run(raw.predict(messages, max_tokens=3, logit_bias=bias, decode_kwargs={"skip_special_tokens": True}))
    assert shown == "<|assistant|>" * 3 and skipped.message.text == ""
    assert run(make_engine().predict(messages, max_tokens=3, logit_bias=bias)).message.text == ""
    with pytest.warns(UserWarning, match="no decode_kwargs truncate_before_pattern"):
        run(raw.predict(messages, max_tokens=1, decode_kwargs={"truncate_before_pattern": "a"}))


def test_json_beside_functions(engine, run):
    """An answer matches the schema, or is a call."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    functions = list(Weather(engine).functions.values())
    for question in ("What is the weather in Rome?", "Tell me a story about a dog."):
        message = run(engine.predict([ChatMessage.user(question)], functions, json_schema=schema)).message
        assert message.tool_calls or isinstance(json.loads(message.text)["ok"], bool)
    text = run(engine.predict([ChatMessage.user("Hello.")], json_schema=schema)).message.text
    assert set(json.loads(text)) == {"ok"}


def test_a_call_that_is_cut_off_is_not_made(engine, run):
    functions = list(Weather(engine).functions.values())
    message = run(engine.predict([ChatMessage.user("What is the weather in Rome?")], functions, max_tokens=12)).message
    assert message.tool_calls is None and message.extra["pace"]["finish_reason"] == "length"


@pytest.mark.parametrize("parser", ["pace's", "kani's"])
def test_thoughts_are_parted_from_the_text(make_engine, model, monkeypatch, run, parser):
    """The template declares that the model reasons, and the answer with its reasoning is scripted."""
    monkeypatch.setattr(model.tokenizer, "chat_template", model.tokenizer.chat_template + "{# <think> </think> #}")
    asked = {"Who are you?": "I am Tiny.", "What is 2 + 2?": "<think>Let me see.</think>It is 4."}
    script = Script(model.tokenizer, asked)
    engine = make_engine(logits_processors=[script], parser="auto" if parser == "pace's" else None)
    chat = Kani(engine if parser == "pace's" else Qwen3Parser(engine))

    async def streamed():
        stream = chat.chat_round_stream("What is 2 + 2?")
        return [piece async for piece in stream], await stream.message()

    pieces, message = run(streamed())
    assert "".join(pieces) == "It is 4."
    assert message.content == [ReasoningPart(content="Let me see."), "It is 4."]
    assert run(chat.chat_round_str("Who are you?")) == "I am Tiny."


# -- messages ----------------------------------------------------------------------------------------------------------


def test_thoughts_are_parts_of_a_message():
    events = [Thought("Let me"), Thought(" see."), Text("\nIt is "), Text("4.\n")]
    message = as_message(events, {})
    assert message.content == [ReasoningPart(content="Let me see."), "It is 4."] and message.text == "It is 4."


def test_whole_calls_alone_are_calls_of_a_message():
    events = [CallBegins(0, "a", "f"), ArgumentsPiece(0, '{"x": 1}'), CallEnds(0), CallBegins(1, "b", "g")]
    (call,) = as_message([*events, ArgumentsPiece(1, '{"y')], {}).tool_calls
    assert call == ToolCall(id="a", type="function", function=FunctionCall(name="f", arguments='{"x": 1}'))


@pytest.mark.parametrize("asked", [False, True])
def test_thoughts_of_a_stream_are_shown_where_asked_for(run, asked):
    pieces = run(shown([Thought("Let me"), Thought(" see."), Text("It is 4.")], shows_thoughts=asked))
    assert pieces == (["\033[0;37mLet me", " see.", "\033[0m"] if asked else []) + ["It is 4."]
