"""What Claude Code and Codex send for services that pace does not have is ignored, and named in the log once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pace.server.errors import ApiError
from pace.server.jobs import ChatPrompt
from pace.server.limits import Limits
from tests.server.serving import QUESTION, Serving

pytest.importorskip("pydantic")
from pace.server.schemas.chat import ChatRequest
from pace.server.schemas.messages import CountTokensRequest, MessagesRequest
from pace.server.schemas.responses import ResponsesRequest
from tests.server.schemas.requests import read

FUNCTION = {"type": "object", "properties": {"a": {"type": "string"}}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{0}; cc_entrypoint=cli; cch={0};"
AGENT = "You are Claude Code."


def of_messages(**body: Any) -> ChatPrompt:
    body = {"messages": QUESTION, **body}
    prompt = read(CountTokensRequest, body).to_prompt(Limits())
    assert read(MessagesRequest, {"max_tokens": 5, **body}).to_prompt(Limits()) == prompt
    return prompt


def of_responses(**body: Any) -> ChatPrompt:
    return read(ResponsesRequest, {"input": QUESTION, **body}).to_prompt(Limits())


def of_chat(**body: Any) -> ChatPrompt:
    return read(ChatRequest, {"messages": QUESTION, **body}).to_prompt(Limits())


def said(prompt: ChatPrompt) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt.messages]


def names(prompt: ChatPrompt) -> list[str]:
    return [(tool.get("function") or tool)["name"] for tool in prompt.tools or ()]


# -- the line that differs in each request -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        lambda line: [{"type": "text", "text": line}, {"type": "text", "text": AGENT}],
        lambda line: [{"type": "text", "text": f"{line}\n{AGENT}", "cache_control": {"type": "ephemeral"}}],
        lambda line: f"{line}\n{AGENT}",
        lambda line: f"{line.replace('x-anthropic-billing-header', 'X-Anthropic-Billing-Header')}\r\n{AGENT}",
    ],
    ids=["block", "line of a block", "line of a text", "other case"],
)
def test_the_billing_line_is_no_part_of_the_prompt(form):
    first, second = (of_messages(system=form(BILLING.format(number))) for number in ("a1", "b2"))
    assert first == second and said(first)[0] == ("system", AGENT)


def test_the_billing_line_alone_is_no_system_prompt():
    assert said(of_messages(system=BILLING.format("1")))[0][0] == "user"
    turns = [{"role": "system", "content": [{"type": "text", "text": BILLING.format("1")}]}, *QUESTION]
    assert said(of_messages(messages=turns)) == [("user", QUESTION[0]["content"])]


def test_only_the_first_line_of_a_system_prompt_is_taken_for_it():
    about = f"Explain {BILLING.format('1')}"
    assert said(of_messages(system=about))[0] == ("system", about)
    asked = [{"role": "user", "content": BILLING.format("1")}]
    assert said(of_messages(messages=asked)) == [("user", asked[0]["content"])]


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search", "external_web_access": False}, {"type": "web_search_preview",
         "search_context_size": "low"},
        {"type": "web_search_2025_08_26"}, {"type": "tool_search", "execution": "client"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close",
         "parameters": FUNCTION}]},
    ],
    ids=lambda tool: tool["type"],
)  # fmt: skip
def test_tools_of_codex(tool):
    own = {"type": "function", "name": "exec", "parameters": FUNCTION, "strict": False}
    for tools in ([tool, own], [own, tool], [tool]):
        prompt = of_responses(tools=tools, tool_choice="auto")
        assert names(prompt) == ["exec"] * (own in tools) and len(prompt.passed_over) == 1
    choice = {"type": tool["type"], **({"name": tool["name"]} if "name" in tool else {})}
    assert of_responses(tools=[own, tool], tool_choice=choice).tool_choice == "auto"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice, {"type": "function", "name": "exec"}]}
    kept = of_responses(tools=[own, tool], tool_choice=allowed).tool_choice
    assert kept == {**allowed, "tools": [{"type": "function", "name": "exec"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_are_passed_over_are_shown_as_they_came(stream):
    """The answer repeats them, as OpenAI's does. They do not become functions, which clients would read without a
    name."""
    tools = [
        {"type": "web_search", "external_web_access": False},
        {"type": "function", "name": "exec", "parameters": {"type": "object", "properties": {}}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close"}]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
        {"type": "tool_search"},
    ]
    with Serving() as serving:
        body = {"input": QUESTION, "tools": tools, "max_output_tokens": 1, "stream": stream}
        reply = serving.ask("/v1/responses", body)
        answers = [event["response"] for event in reply.events if "response" in event] if stream else [reply.json]
    shown = [*tools]
    shown[1] = {**tools[1], "description": None, "strict": False}
    assert answers and all(answer["tools"] == shown for answer in answers)


def test_tools_of_claude_code():
    own = {"name": "Bash", "input_schema": FUNCTION, "defer_loading": True}
    custom = {"type": "custom", "name": "Read", "input_schema": FUNCTION}  # Anthropic's name for a client's own tool
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    find = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    prompt = of_messages(tools=[search, own, find, custom])
    assert names(prompt) == ["Bash", "Read"] and len(prompt.passed_over) == 2
    assert of_messages(tools=[search, own], tool_choice={"type": "tool", "name": "web_search"}).tool_choice == "auto"
    assert of_messages(tools=[search], tool_choice={"type": "auto"}).tools == []


def test_tools_of_chat():
    own = {"type": "function", "function": {"name": "f", "parameters": FUNCTION}}
    custom = {"type": "custom", "custom": {"name": "code", "format": {"type": "text"}}}
    assert names(of_chat(tools=[custom, own], tool_choice={"type": "custom", "custom": {"name": "code"}})) == ["f"]
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "custom", "custom": {"name": "code", "input": "1+1"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "Two.", "tool_calls": [
            {"id": "c2", "type": "custom", "custom": {"name": "code", "input": "1+1"}},
            {"id": "c3", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c2", "content": "2"}, {"role": "tool", "tool_call_id": "c3", "content": "3"},
    ]  # fmt: skip
    prompt = of_chat(messages=history, tools=[own])
    assert said(prompt) == [("user", QUESTION[0]["content"]), ("assistant", "Two."), ("tool", "3")]
    assert [call["id"] for call in prompt.messages[1]["tool_calls"]] == ["c3"]


def test_other_services_are_refused_by_name():
    with Serving() as serving:
        for kind in ("code_interpreter", "file_search", "computer_use_preview", "mcp", "customs"):
            reply = serving.ask("/v1/responses", {"input": QUESTION, "tools": [{"type": kind}]})
            assert reply.status == 400 and reply.error["param"] == "tools[0].type"
    for kind in ("bash_20250124", "code_execution_20250522", "text_editor_20250728"):
        with pytest.raises(ApiError, match=kind):
            of_messages(tools=[{"type": kind, "name": "x"}])


# -- a history ---------------------------------------------------------------------------------------------------------


def test_items_of_codex():
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "custom_tool_call", "status": "completed", "call_id": "c1", "name": "apply_patch", "input": "*** x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "tool_search_call", "call_id": "c2", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "c2", "tools": []},
        {"type": "function_call", "call_id": "c3", "name": "close", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": "closed"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]
    prompt = of_responses(input=items)
    assert said(prompt) == [("user", "a"), ("assistant", ""), ("tool", "closed"), ("assistant", "b"), ("user", "c")]
    assert prompt.messages[1]["reasoning_content"] == "hm" and len(prompt.passed_over) == 5
    with pytest.raises(ApiError, match="input must contain a message"):
        of_responses(input=items[2:5])
    with pytest.raises(ApiError, match="computer_call"):
        of_responses(input=[*items, {"type": "computer_call", "call_id": "x"}])


def test_blocks_of_claude_code():
    def reference(name: str) -> dict[str, str]:
        return {"type": "tool_reference", "tool_name": name}

    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result"}]},
            {"type": "text", "text": "b"}, {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [reference("Bash"), {"type": "text",
             "text": "c"}]}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t2", "name": "ToolSearch", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t2", "content": [reference("Read")] * 40}, reference("Bash")]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s2", "name": "tool_search_tool_regex", "input": {}},
            {"type": "tool_search_tool_result", "tool_use_id": "s2", "content": {"tool_references": []}}]},
        {"role": "user", "content": "d"},
    ]  # fmt: skip
    expected = [("user", "a"), ("assistant", "b"), ("tool", "c"), ("assistant", ""), ("tool", ""), ("user", "d")]
    prompt = of_messages(messages=turns)
    assert said(prompt) == expected and len(prompt.passed_over) == 4
    with pytest.raises(ApiError, match="messages"):
        of_messages(messages=[{"role": "user", "content": [reference("Bash")]}])


@pytest.mark.parametrize("value", [{"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, {}, None])
def test_context_management(value):
    assert of_messages(context_management=value).passed_over == (("context_management",) if value else ())


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def test_answers_are_the_same_and_the_log_says_it_once(caplog):
    plain = {"model": "tiny", "messages": QUESTION, "max_tokens": 20, "temperature": 0, "system": AGENT}
    search = [{"type": "web_search_20250305", "name": "web_search"}]
    with Serving() as serving, caplog.at_level(logging.INFO, "pace"):
        expected = serving.ask("/v1/messages", plain).json["content"]
        for number in range(3):
            system = [{"type": "text", "text": BILLING.format(number)}, {"type": "text", "text": AGENT}]
            body = {**plain, "system": system, "tools": search, "context_management": {"edits": [{"type": "x"}]}}
            reply = serving.ask("/v1/messages", body)
            assert reply.json["content"] == expected and "x-pace-ignored" not in reply.headers
            del body["max_tokens"], body["temperature"]
            assert serving.ask("/v1/messages/count_tokens", body).status == 200
        tools = [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}]
        codex = {
            "model": "tiny",
            "input": QUESTION,
            "tools": tools,
            "client_metadata": {"x": "y"},
            "max_output_tokens": 3,
        }
        for _ in range(2):
            assert serving.ask("/v1/responses", codex).status == 200
            assert serving.ask("/v1/responses/input_tokens", codex).status == 200
    lines = [record.getMessage() for record in caplog.records if ": ignored" in record.getMessage()]
    assert [line.partition(":")[0] for line in lines] == [
        "tools of the type web_search", "context_management", "tools of the type custom"
    ]  # fmt: skip


def test_the_changing_line_leaves_the_prefix_cache_alone():
    from tests.server.serving import make_generator

    generator = make_generator(kv_cache_bytes="32MiB")
    with Serving(generator) as serving:
        cached = []
        for number in range(2):
            system = [{"type": "text", "text": BILLING.format(number)}, {"type": "text", "text": "Be brief. " * 60}]
            body = {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "system": system}
            usage = serving.ask("/v1/messages", body).json["usage"]
            cached.append((usage["cache_read_input_tokens"], usage["input_tokens"]))
    generator.driver.close()
    assert cached[0][0] == 0 and cached[1][1] < 32 < cached[1][0]


@pytest.mark.parametrize("place", [1, 2])
def test_a_template_without_later_system_turns_has_them_in_the_users(place, monkeypatch):
    """Claude Code sends a system turn after the first user turn. Some templates refuse that."""
    refuses = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    turns.insert(place, {"role": "system", "content": "s"})
    expected = ["<user>a\ns<assistant>b<user>c", "<user>a<assistant>b<user>s\nc"][place - 1]
    with Serving() as serving:
        reader = serving.service.reader
        monkeypatch.setattr(reader.template.tokenizer, "chat_template", refuses)
        assert reader.render(of_messages(messages=turns)) == expected
        assert reader.render(of_messages(messages=turns, system="t")) == "<system>t" + expected
