"""What a request of Anthropic's Messages becomes, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from pace.llm.configs import SamplingConfig
from pace.server.errors import ApiError
from pace.server.jobs import ChatPrompt, Job
from pace.server.limits import Limits

pytest.importorskip("pydantic")
from pace.server.schemas.fields import parse
from pace.server.schemas.messages import (
    MESSAGES_INERT,
    MESSAGES_REFUSED,
    CountTokensRequest,
    MessagesRequest,
)

HI = [{"role": "user", "content": "hi"}]


def job_of(body: Any, defaults: SamplingConfig | None = None, limits: Limits | None = None) -> Job:
    request, unknown = parse(MessagesRequest, body, MESSAGES_REFUSED, MESSAGES_INERT)
    assert unknown == []
    return request.to_job(limits or Limits(), defaults or SamplingConfig())


def prompt_of(**body: Any) -> ChatPrompt:
    """Of a request to count tokens, and of one for an answer: they are the same."""
    request, unknown = parse(CountTokensRequest, body, MESSAGES_REFUSED, MESSAGES_INERT)
    prompt = request.to_prompt(Limits())
    assert unknown == [] and prompt == job_of({"max_tokens": 5, **body}).prompt
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


def test_sampling_is_what_was_asked() -> None:
    body = {"messages": HI, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["x", "y"]}
    job = job_of(body | {"stream": True, "seed": 7, "cache_salt": "s"})
    config = job.sampling
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 0.5, 0.9, 3)
    assert (config.stop_strings, config.seed) == (["x", "y"], 7)
    assert (job.max_tokens, job.stream, job.cache_salt) == (5, True, "s")
    config = job_of({"messages": HI, "max_tokens": 5}).sampling
    assert (config.do_sample, config.temperature, config.top_k, config.stop_strings) == (True, 1.0, 0, None)
    assert job_of({"messages": HI, "max_tokens": 5, "temperature": 0}).sampling.do_sample is False


def test_thinking_and_effort_are_for_the_template() -> None:
    prompt = prompt_of(messages=HI, thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert prompt.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


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
    [
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [1]}}, "context_management"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        job_of({"messages": HI, "max_tokens": 5} | fields)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, param, "unsupported_parameter")
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": HI * 4097}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages[0].content[0]"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"temperature": 1.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a" * 257]}, "stop_sequences"),
        ({"stream": "true"}, "stream"),
        ({"seed": 2**64}, "seed"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"thinking": "off"}, "thinking"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        job_of({"messages": HI, "max_tokens": 5} | fields)
    assert (caught.value.status, caught.value.param) == (400, param) and param in caught.value.message


def test_how_much_is_wanted_must_be_said() -> None:
    with pytest.raises(ApiError, match="max_tokens: is missing"):
        job_of({"messages": HI})
    assert prompt_of(messages=HI).messages == HI
