"""`LLMModel.chat`: answers with text, calls and thoughts, streamed or whole."""

from __future__ import annotations

import json

import jsonschema
import pytest

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig
from pace.llm.chat import ArgumentsPiece, CallBegins, CallEnds, Text, Tool, ToolError, calls_of
from tests.llm.generators import check_idle

pytest.importorskip("llguidance")

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY}}
TIME = Tool("get_time", "The time.", CITY)
TOOLS = [WEATHER, TIME]
QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="module")
def model():
    with LLMModel(TINY, progress=False) as model:
        yield model
        check_idle(model, None)


def test_a_question_and_its_answer(model) -> None:
    out = model.chat("What is the capital of France?")
    assert out.text == "The capital of France is Paris." and out.finish_reason == "stop"
    assert out.tool_calls == [] and out.thought == ""
    assert out.message == {"role": "assistant", "content": out.text}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    template = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert model.generate(template).texts[0] == out.text


def test_a_call_and_what_comes_of_it(model) -> None:
    out = model.chat(QUESTION, tools=TOOLS)
    assert out.finish_reason == "tool_calls" and out.text == ""
    (call,) = out.tool_calls
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 25 degrees"}
    after = model.chat([*QUESTION, out.message, result], tools=TOOLS)
    assert "25" in after.text and after.finish_reason == "stop"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_stream_tells_the_same(model, choice) -> None:
    whole = model.chat(QUESTION, tools=TOOLS, tool_choice=choice)
    answer = model.chat(QUESTION, tools=TOOLS, tool_choice=choice, stream=True)
    events = list(answer)
    assert [type(event) for event in events[:2]] == [CallBegins, ArgumentsPiece] and isinstance(events[-1], CallEnds)
    (streamed,) = calls_of(events)
    (called,) = whole.tool_calls
    assert (streamed.name, streamed.arguments) == (called.name, called.arguments)
    assert answer.output.tool_calls == [streamed] and answer.output.finish_reason == whole.finish_reason


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("question", ["Tell me a story.", "What is 7 + 8?"])
def test_required_calls_are_certain(model, seed: int, question: str) -> None:
    config = SamplingConfig(do_sample=True, temperature=3.0, top_k=0, seed=seed, max_new_tokens=150)
    out = model.chat(question, config, tools=TOOLS, tool_choice="required")
    assert out.text == "" and out.tool_calls
    whole = out.tool_calls if out.finish_reason == "tool_calls" else out.tool_calls[:-1]
    for call in whole:
        assert call.name in ("get_weather", "get_time")
        jsonschema.validate(json.loads(call.arguments), CITY)
    one = model.chat(question, config, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(one.tool_calls) == 1


def test_no_call_where_none_is_allowed(model) -> None:
    out = model.chat(QUESTION, tools=TOOLS, tool_choice="none")
    assert out.tool_calls == [] and out.text == model.chat(QUESTION).text


def test_a_call_that_is_cut_off(model) -> None:
    out = model.chat(QUESTION, SamplingConfig(max_new_tokens=14), tools=TOOLS)
    assert out.finish_reason == "length" and out.tool_calls[0].name == "get_weather"
    assert "{" in out.tool_calls[0].arguments and not out.tool_calls[0].arguments.endswith("}")
    out = model.chat(QUESTION, SamplingConfig(max_new_tokens=3), tools=TOOLS, tool_choice="required")
    assert (out.finish_reason, out.text, out.tool_calls) == ("length", "", [])


def test_a_form_of_the_answer(model) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": CITY, "strict": True}}
    assert set(json.loads(model.chat("A city, please.", response_format=form).text)) == {"city"}
    assert model.chat("Yes or no?", SamplingConfig(choices=["yes", "no"])).text in ("yes", "no")
    with_tools = model.chat("What is the capital of France?", response_format=form, tools=TOOLS)
    assert with_tools.tool_calls or json.loads(with_tools.text)
    called = model.chat(QUESTION, response_format=form, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert [call.name for call in called.tool_calls] == ["get_weather"] and called.text == ""


def test_another_format_of_calls(model) -> None:
    for name in ("llama3", "pythonic", "mistral_v11", "glm45", "deepseek_v3", "harmony", "qwen_coder"):
        out = model.chat(QUESTION, tools=TOOLS, tool_choice="required", tool_format=name)
        for call in out.tool_calls if out.finish_reason == "tool_calls" else ():
            jsonschema.validate(json.loads(call.arguments), CITY)
        assert out.tool_calls, name


def test_closing_a_stream_ends_it(model) -> None:
    answer = model.chat("Tell me a story about a fox.", SamplingConfig(max_new_tokens=400), stream=True)
    pieces = [next(answer) for _ in range(5)]
    answer.close()
    assert all(isinstance(piece, Text) for piece in pieces) and list(answer) == []
    assert answer.output.finish_reason == "cancelled" and answer.output.text.startswith(pieces[0].text)
    model.chat("Tell me a story about a fox.", stream=True).close()  # closed before it began


def test_logprobs_and_stop_strings(model) -> None:
    out = model.chat("What is the capital of France?", SamplingConfig(logprobs=1, stop_strings=["France"]))
    assert out.text == "The capital of " and out.logprobs and out.metrics.num_generated_tokens == len(out.logprobs)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tools": [{"type": "function"}]}, ToolError, r"tools\[0\]"),
        ({"tools": [WEATHER, WEATHER]}, ToolError, "names must differ"),
        ({"tool_choice": "required"}, ToolError, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, ToolError, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, ToolError, "not a tool"),
        ({"tools": TOOLS, "tool_format": "nobody's"}, ValueError, "hermes"),
        ({"sampling_config": SamplingConfig(do_sample=True, num_return_sequences=2)}, ValueError, "one text"),
        ({"sampling_config": SamplingConfig(num_beams=2)}, ValueError, "num_beams"),
        ({"response_format": {"type": "yaml"}}, ValueError, "yaml"),
    ],
)
def test_what_cannot_be_asked(model, arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        model.chat(QUESTION, **arguments)
