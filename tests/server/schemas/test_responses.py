"""Requests of OpenAI's Responses API: what they become, and the fields refused by name."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest

from pace.llm.configs import SamplingConfig
from pace.server.limits import Limits

pytest.importorskip("pydantic")
from pace.server.schemas.responses import ResponsesRequest
from tests.server.schemas import requests

job_of = functools.partial(requests.job_of, ResponsesRequest)
refusal_of = functools.partial(requests.refusal_of, ResponsesRequest)


def messages_of(**body: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in job_of(body).prompt.messages]


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_a_string_is_a_question_of_the_user() -> None:
    job = job_of({"model": "tiny", "input": "hi"})
    assert job.prompt.messages == [{"role": "user", "content": "hi"}]
    assert job.prompt.add_generation_prompt and not job.prompt.continue_final_message
    assert job.max_tokens is None and not job.stream and not job.wants_tokens and job.num_choices == 1


def test_items_are_messages() -> None:
    items = [
        {"type": "message", "role": "user", "content": [part("a"), part("b")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
            part("c", "output_text") | {"annotations": [], "logprobs": []}]},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": ""},
    ]  # fmt: skip
    assert messages_of(input=items) == [("user", "ab"), ("assistant", "c"), ("system", "d"), ("user", "")]


def test_thoughts_go_back_to_the_template() -> None:
    def thinks(*texts: str, **members: Any) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text} for text in texts], **members}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "x"}, thinks("a", "b"), call,
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        thinks(summary=[{"type": "summary_text", "text": "c"}]), {"role": "assistant", "content": "y"}, thinks("d"),
        call, thinks("of nothing that follows"), {"role": "user", "content": "z"},
        {"role": "assistant", "content": "without"},
    ]  # fmt: skip
    messages = job_of({"input": items}).prompt.messages
    thoughts = [(message["role"], message.get("reasoning_content")) for message in messages]
    assert thoughts == [
        ("user", None), ("assistant", "a\nb"), ("tool", None), ("assistant", "c\nd"), ("user", None), ("assistant",
         None)
    ]  # fmt: skip


def test_instructions_and_leading_system_messages_are_one() -> None:
    items = [
        {"role": "developer", "content": "b"},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert messages_of(input=items, instructions="a") == [("system", "a\n\nb\n\nc"), ("user", "d")]
    assert messages_of(input="d", instructions="a") == [("system", "a"), ("user", "d")]
    assert messages_of(input=items[1:]) == [("system", "c"), ("user", "d")]
    assert messages_of(input="d", instructions="") == [("user", "d")]


def test_sampling_is_what_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    body = {"input": "hi", "temperature": 0.5, "top_p": 0.9, "seed": -1, "stop": "x", "max_output_tokens": 7}
    job = job_of(body | {"min_p": 0.1, "top_k": 3, "stream": True, "cache_salt": "s"})
    config = job.sampling
    assert (config.do_sample, config.temperature, config.top_p, config.min_p) == (True, 0.5, 0.9, 0.1)
    assert (config.top_k, config.seed, config.stop_strings) == (3, 2**64 - 1, ["x"])
    request = ResponsesRequest.model_validate(body | {"typical_p": 0.5})
    assert request.to_job(Limits(), SamplingConfig()).sampling.typical_p == 1.0, "no field of this endpoint"
    assert (job.max_tokens, job.stream, job.cache_salt) == (7, True, "s")
    with caplog.at_level(logging.WARNING, "pace"):
        config.check_consistent()
    assert not caplog.records


def test_what_is_left_open_is_the_checkpoints() -> None:
    config = job_of({"input": "hi"}).sampling
    assert (config.do_sample, config.temperature, config.top_k) == (True, 0.7, 0)
    config = job_of({"input": "hi"}, SamplingConfig(temperature=0.6, top_k=20)).sampling
    assert (config.temperature, config.top_k) == (0.6, 20)
    assert job_of({"input": "hi", "temperature": 0}).sampling.do_sample is False


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"top_logprobs": 0}, None), ({"top_logprobs": 3}, 3),
     ({"include": ["message.output_text.logprobs"]}, 0),
     ({"include": ["reasoning.encrypted_content"]}, None)],
)  # fmt: skip
def test_log_probabilities_are_for_those_who_ask(fields: dict[str, Any], logprobs: int | None) -> None:
    job = job_of({"input": "hi"} | fields)
    assert job.sampling.logprobs == logprobs and job.wants_tokens == (logprobs is not None)


def test_effort_is_for_the_template() -> None:
    assert job_of({"input": "hi", "reasoning": {"effort": "low", "summary": "auto"}}).prompt.template_kwargs == {
        "reasoning_effort": "low"
    }
    kwargs = job_of({"input": "hi", "reasoning": {"effort": "none"}}).prompt.template_kwargs
    assert kwargs == {"reasoning_effort": "none", "enable_thinking": False}


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"store": False, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}},
        {"parallel_tool_calls": False, "max_tool_calls": 3, "tool_choice": "none", "tools": []},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "disabled", "service_tier": "auto"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"previous_response_id": None, "background": False, "conversation": None, "prompt": None},
        {"prompt_cache_options": {"mode": "implicit"}, "tool_choice": "auto"},
    ],
)
def test_fields_without_effect_are_taken(fields: dict[str, Any]) -> None:
    assert job_of({"input": "hi"} | fields).prompt.messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "conv_1"}, "conversation"),
     ({"background": True}, "background"), ({"prompt": {"id": "p"}}, "prompt"),
     ({"context_management": [{"type": "compaction"}]}, "context_management"),
     ({"moderation": {"model": "m"}}, "moderation"), ({"truncation": "auto"}, "truncation"),
     ({"service_tier": "flex"}, "service_tier"),
     ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
     ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
     ({"input": [{"role": "user", "content": "a"}, {"type": "computer_call"}]}, "input[1]"),
     ({"input": [{"type": "mcp_call", "id": "c", "name": "f", "arguments": ""}]}, "input[0]"),
     ({"tools": [{"type": "function", "name": "f"}], "top_logprobs": 1}, "top_logprobs")],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal_of({"input": "hi"} | fields)
    assert error.param == param and error.code == "unsupported_parameter" and error.message.startswith(param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [part("a"), {"type": "input_text"}]}]}, "input[0].content[1]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///"}]}]},
         "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [part("a")] * 4097}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": 5, "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{}]}]}, "input[0].output[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 129}, "input[128]"),
        ({"tools": 5}, "tools"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": "5"}, "top_logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal_of({"input": "hi"} | fields)
    assert error.param == param and param in error.message


def test_calls_belong_to_the_message_that_they_follow() -> None:
    items = [
        {"role": "user", "content": "a"}, {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [part("b")]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}', "id": "fc_1",
          "status": "done"}, {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [part("2"), part("3")]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    ]  # fmt: skip
    tools = [{"type": "function", "name": "f"}]
    prompt = job_of({"input": items, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}).prompt
    calls = [(message["role"], message["content"], message.get("tool_call_id")) for message in prompt.messages]
    results = [("tool", "1", "c1"), ("tool", "23", "c2")]
    assert calls == [("user", "a", None), ("assistant", "b", None), *results, ("assistant", "", None)]
    names = [[call["id"] for call in message.get("tool_calls", ())] for message in prompt.messages]
    assert names == [[], ["c1", "c2"], [], [], ["c3"]]
    function = {"name": "f", "arguments": '{"x": 1}'}
    assert prompt.messages[1]["tool_calls"][0] == {"id": "c1", "type": "function", "function": function}
    assert (prompt.tools, prompt.tool_choice, prompt.parallel_calls) == (tools, "required", False)


def test_limits_are_those_of_the_table() -> None:
    items = [{"role": "user", "content": "a"}] * 3
    assert refusal_of({"input": items}, Limits(messages=2)).param == "input"
    assert job_of({"input": items}, limits=Limits(messages=3)).prompt.messages == items
    assert refusal_of({}).message == "input: is missing"
