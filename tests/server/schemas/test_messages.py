"""Requests of Anthropic's Messages API: what they become, and the fields refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pace.server.jobs import ChatPrompt
from pace.server.limits import Limits

pytest.importorskip("pydantic")
from pace.server.schemas.messages import CountTokensRequest, MessagesRequest
from tests.server.schemas import requests

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Köln"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}
FIRST = "messages[0].content[0]"


job_of = functools.partial(requests.job_of, MessagesRequest)
refusal_of = functools.partial(requests.refusal_of, MessagesRequest)


def prompt_of(**body: Any) -> ChatPrompt:
    """The prompt of a request for an answer, after a check that a request to count tokens has the same prompt."""
    prompt = requests.read(CountTokensRequest, body).to_prompt(Limits())
    assert prompt == job_of({"max_tokens": 5, **body}).prompt
    return prompt


def said(prompt: ChatPrompt) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt.messages]


def block(text: str, **members: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **members}


def test_turns_are_messages() -> None:
    turns = [
        {"role": "user", "content": [block("a", cache_control={"type": "ephemeral"}), block("b", citations=None)]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, block("c")]},
        {"role": "user", "content": "d"},
    ]
    prompt = prompt_of(messages=turns, system=[block("s", cache_control={"type": "ephemeral"})])
    assert said(prompt) == [("system", "s"), ("user", "ab"), ("assistant", "c"), ("user", "d")]
    assert prompt.add_generation_prompt and not prompt.continue_final_message and prompt.template_kwargs == {}


def test_thoughts_go_back_to_the_template() -> None:
    def thinks(text: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": text, "signature": "s"}

    turns = [
        *HI, {"role": "assistant", "content": [thinks("a"), CALL]}, {"role": "user", "content": [RESULT]},
        {"role": "assistant", "content": [thinks("b"), {"type": "redacted_thinking", "data": "x"}, thinks("c")]},
        {"role": "assistant", "content": [thinks("d"), block("e")]}, *HI,
    ]  # fmt: skip
    thoughts = [message.get("reasoning_content") for message in prompt_of(messages=turns, tools=[TOOL]).messages]
    assert thoughts == [None, "a", None, "b\nc\nd", None]


def test_blocks_of_a_system_prompt_are_lines() -> None:
    assert said(prompt_of(messages=HI, system=[block("Be brief."), block("Be kind.")]))[0] == (
        "system",
        "Be brief.\nBe kind.",
    )


def test_neighbours_of_one_role_are_one_turn() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    assert said(prompt_of(messages=turns)) == [("user", "a\nb"), ("assistant", "c")]
    turns = [{"role": "system", "content": "s"}, *HI]
    assert said(prompt_of(messages=turns, system="r")) == [("system", "r\ns"), ("user", "hi")]


def test_an_answer_goes_on_with_a_last_turn_of_the_assistant() -> None:
    prompt = prompt_of(messages=[*HI, {"role": "assistant", "content": "The best is ("}])
    assert prompt.continue_final_message and not prompt.add_generation_prompt
    prompt = prompt_of(messages=[*HI, {"role": "assistant", "content": ""}])
    assert said(prompt) == [("user", "hi")] and prompt.add_generation_prompt and not prompt.continue_final_message


def test_calls_and_their_results_are_messages() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    error = {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True}
    turns = [
        *HI,
        {"role": "assistant", "content": [thought, block("Let me see."), CALL, CALL | {"id": "t2"}]},
        {"role": "user", "content": [block("And?"), RESULT, error]},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [RESULT]},
    ]
    choice = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    prompt = prompt_of(messages=turns, tools=[TOOL | {"type": "custom"}], tool_choice=choice)
    assert said(prompt) == [
        ("user", "hi"),
        ("assistant", "Let me see."),
        ("tool", "sunny"),
        ("tool", "Error: no such city"),
        ("user", "And?"),
        ("assistant", ""),
        ("tool", "sunny"),
    ]
    calls = prompt.messages[1]["tool_calls"]
    assert [call["id"] for call in calls] == ["t1", "t2"] and prompt.messages[3]["tool_call_id"] == "t2"
    assert calls[0]["function"] == {"name": "f", "arguments": '{"city": "Köln"}'}
    assert prompt.tools == [TOOL] and prompt.tool_choice == {"type": "function", "name": "f"}
    assert not prompt.parallel_calls and prompt_of(messages=HI).parallel_calls


@pytest.mark.parametrize(("kind", "choice"), [("any", "required"), ("auto", "auto"), ("none", "none")])
def test_choices_have_names_of_their_own(kind: str, choice: str) -> None:
    assert prompt_of(messages=HI, tools=[TOOL], tool_choice={"type": kind}).tool_choice == choice


def test_sampling_is_what_was_asked() -> None:
    body = {"messages": HI, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["x", "y"]}
    job = job_of(body | {"stream": True, "seed": 7, "cache_salt": "s"})
    config = job.sampling
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 0.5, 0.9, 3)
    assert (config.stop_strings, config.seed) == (["x", "y"], 7)
    assert (job.max_tokens, job.stream, job.cache_salt) == (5, True, "s")
    config = job_of({"messages": HI, "max_tokens": 5}).sampling
    assert (config.do_sample, config.temperature, config.top_k, config.stop_strings) == (True, 0.7, 0, None)
    assert job_of({"messages": HI, "max_tokens": 5, "temperature": 0}).sampling.do_sample is False


def test_thinking_and_effort_are_for_the_template() -> None:
    prompt = prompt_of(messages=HI, thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert prompt.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}):
        assert prompt_of(messages=HI, thinking=thinking).template_kwargs == {"enable_thinking": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard", "inference_geo": "eu"},
        {"cache_control": {"type": "ephemeral"}, "diagnostics": {"previous_message_id": "m"}},
        {"tools": [], "tool_choice": {"type": "auto"}, "container": None},
        {"tool_choice": {"type": "none"}, "user_profile_id": "u", "workspace_id": "w"},
    ],
)
def test_fields_without_effect_are_taken(fields: dict[str, Any]) -> None:
    assert job_of({"messages": HI, "max_tokens": 5} | fields).prompt.messages == HI


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"mcp_servers": [{"url": "u"}]}, "mcp_servers"), ({"container": "c"}, "container"),
     ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type")],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal_of({"messages": HI, "max_tokens": 5} | fields)
    assert (error.param, error.code) == (param, "unsupported_parameter") and error.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
     ({"max_tokens": "5"}, "max_tokens"), ({"messages": None}, "messages"), ({"messages": []}, "messages"),
     ({"messages": HI * 4097}, "messages"), ({"messages": [5]}, "messages[0]"),
     ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
     ({"messages": [{"role": "user"}]}, "messages[0].content"),
     ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
     ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
     ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
     ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
     ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
     ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0]"),
     ({"messages": [{"role": "user", "content": [RESULT | {"tool_use_id": 5}]}]}, f"{FIRST}.tool_use_id"),
     ({"messages": [{"role": "user", "content": [RESULT | {"content": [{}]}]}]}, f"{FIRST}.content[0]"),
     ({"messages": [{"role": "user", "content": [RESULT] * 129}]}, "messages[0].content"),
     ({"messages": [{"role": "user", "content": [RESULT, {"type": "image"}]}]}, "messages[0].content[1]"),
     ({"messages": [{"role": "assistant", "content": [CALL | {"id": None}]}]}, f"{FIRST}.id"),
     ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, f"{FIRST}.thinking"),
     ({"messages": [{"role": "assistant", "content": [CALL | {"input": "{}"}]}]}, f"{FIRST}.input"),
     ({"messages": [{"role": "assistant", "content": [CALL]}]}, "messages"), ({"tools": 5}, "tools"),
     ({"tool_choice": {"type": "required"}}, "tool_choice.type"), ({"thinking": {"type": "on"}}, "thinking.type"),
     ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages[0].content[0]"),
     ({"system": 5}, "system"), ({"system": [{"type": "image"}]}, "system[0]"), ({"temperature": 1.1}, "temperature"),
     ({"temperature": -0.1}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"),
     ({"top_k": -2}, "top_k"), ({"stop_sequences": "x"}, "stop_sequences"),
     ({"stop_sequences": [""]}, "stop_sequences"), ({"stop_sequences": ["a" * 257]}, "stop_sequences"),
     ({"stream": "true"}, "stream"), ({"seed": 2**64}, "seed"), ({"cache_salt": ""}, "cache_salt"),
     ({"thinking": "off"}, "thinking"), ({"output_config": {"effort": "huge"}}, "output_config.effort")],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal_of({"messages": HI, "max_tokens": 5} | fields)
    assert error.param == param and param in error.message


def test_how_much_is_wanted_must_be_said() -> None:
    assert refusal_of({"messages": HI}).message == "max_tokens: is missing"
    assert prompt_of(messages=HI).messages == HI
