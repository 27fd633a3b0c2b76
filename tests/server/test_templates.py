"""Conversations over HTTP for models with other templates: the prompt contains everything, or the answer is 400."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from tests.llm.chat.test_families import LFM25_THINKING, NEMOTRON3, QWEN35, QWEN_CODER
from tests.llm.chat.test_manners import CALLS, GEMMA, GUARD, IGNORES, in_order
from tests.server.serving import LONG, Serving, shared_generator

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]
CALLED = [{"role": "user", "content": "Well?"},
          {"role": "assistant", "content": None, "tool_calls": [
              {"id": f"c{k}", "type": "function", "function": {"name": "time",
               "arguments": '{"city": "city%d"}' % k}} for k in range(2)]},
          *({"role": "tool", "tool_call_id": f"c{k}", "content": f"result{k}"} for k in range(2))]  # fmt: skip

ONE = {"role": "user", "content": "One?"}


@contextmanager
def with_template(template):
    generator = shared_generator()
    before = generator.tokenizer.chat_template
    generator.tokenizer.chat_template = template
    try:
        with Serving(generator) as serving:
            yield serving
    finally:
        generator.tokenizer.chat_template = before


def test_parts_in_place_of_a_string():
    with with_template(GUARD) as serving:
        body = {"messages": [{"role": "user", "content": "How do I steal?"}]}
        assert "User: How do I steal?" in serving.ask("/apply-template", body).json["prompt"]
        few, more = (serving.chat([{"role": "user", "content": text}], max_tokens=1).json["usage"]["prompt_tokens"]
                     for text in ("Hi", "Hi " * 20))  # fmt: skip
        assert more > few + 15


@pytest.mark.parametrize("template", [GEMMA, CALLS["first"], CALLS["last"], CALLS["single"], CALLS["none"]])
def test_several_calls_and_results(template):
    with with_template(template) as serving:
        prompt = serving.ask("/apply-template", {"messages": CALLED, "tools": TOOLS}).json["prompt"]
        in_order(prompt, "Well?", "city0", "city1")
        in_order(prompt, "city0", "result0")
        in_order(prompt, "city1", "result1")
        assert serving.chat(CALLED, tools=TOOLS, max_tokens=1).status == 200
        reply = serving.chat([*CALLED, {"role": "user", "content": "And?"}], tools=TOOLS, max_tokens=1)
        assert reply.status == 200


def test_what_a_template_leaves_out_is_refused():
    with with_template("{{ messages[-1].content }}") as serving:
        reply = serving.chat([{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Fine."}, ONE])
        assert reply.status == 400 and reply.error["param"] == "messages"
        assert reply.error["message"].startswith("the chat template leaves out messages[0].content, of the role 'user'")
        assert serving.chat([ONE], max_tokens=1).status == 200
    with with_template(GEMMA) as serving:
        assert "roles must alternate" in serving.chat([ONE, ONE]).error["message"]


@pytest.mark.parametrize("template", [GEMMA, IGNORES])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_that_a_template_does_not_take_are_in_the_users_turn(template, role):
    with with_template(template) as serving:
        body = {"messages": [{"role": role, "content": "Be kind."}, ONE]}
        in_order(serving.ask("/apply-template", body).json["prompt"], "<user>Be kind.", "One?")
        assert serving.chat(body["messages"], max_tokens=1).status == 200


ASKED = {"role": "user", "content": "Well?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"city": "Rome", "now": true}'}}
STEPS = [ASKED, {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
         {"role": "tool", "tool_call_id": "c1", "content": "Noon."}]  # fmt: skip
BLOCKS = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I look."},
          {"type": "tool_use", "id": "c1", "name": "time", "input": {"city": "Rome", "now": True}}]  # fmt: skip
OTHER_STEPS = [
    ASKED,
    {"role": "assistant", "content": BLOCKS},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Noon."}]},
]
OTHER_TOOLS = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS]


@pytest.mark.parametrize("template", [QWEN35, QWEN_CODER, NEMOTRON3, LFM25_THINKING])
def test_calls_thoughts_and_results_are_the_same_in_every_form(template):
    """A conversation of OpenAI's and one of Anthropic's make the same prompt."""
    with with_template(template) as serving:
        prompt = serving.ask("/apply-template", {"messages": STEPS, "tools": TOOLS}).json["prompt"]
        in_order(prompt, *(["Hm."] if template != QWEN_CODER else []), "I look.", "Rome", "True", "Noon.")
        count = len(serving.ask("/tokenize", {"prompt": prompt, "add_special_tokens": False}).json["tokens"])
        chat = serving.chat(STEPS, tools=TOOLS, max_tokens=1)
        assert chat.status == 200 and chat.json["usage"]["prompt_tokens"] == count
        body = {"model": "tiny", "messages": OTHER_STEPS, "tools": OTHER_TOOLS}
        assert serving.ask("/v1/messages/count_tokens", body).json["input_tokens"] == count


@pytest.mark.parametrize(
    ("template", "variables", "thoughts"),
    [(QWEN35, {}, ""), (QWEN35, {"preserve_thinking": True}, "Hm."), (NEMOTRON3, {}, ""),
     (NEMOTRON3, {"truncate_history_thinking": False}, "Hm."), (LFM25_THINKING, {"keep_past_thinking": True}, "Hm.")],
)  # fmt: skip
def test_variables_of_a_request_reach_the_template(template, variables, thoughts):
    with with_template(template) as serving:
        talk = [*STEPS, {"role": "assistant", "content": "Noon."}, ASKED]
        body = {"messages": talk, "tools": TOOLS, "chat_template_kwargs": variables}
        prompt = serving.ask("/apply-template", body).json["prompt"]
        assert prompt.count("Hm.") == thoughts.count("Hm.")


@pytest.mark.parametrize("template", [QWEN35, NEMOTRON3])
def test_thinking_is_turned_off_in_every_form(template):
    with with_template(template) as serving:

        def count(path, **body):
            return serving.ask(path, {"model": "tiny", **body}).json["input_tokens"]

        chat, messages, responses = "/v1/chat/completions/input_tokens", "/v1/messages/count_tokens", \
            "/v1/responses/input_tokens"  # fmt: skip
        thinking = count(chat, messages=[ASKED])
        off = count(chat, messages=[ASKED], chat_template_kwargs={"enable_thinking": False})
        assert thinking < off
        assert count(chat, messages=[ASKED], reasoning_effort="none") == off
        assert count(messages, messages=[ASKED], thinking={"type": "disabled"}) == off
        assert count(responses, input=[ASKED], reasoning={"effort": "none"}) == off
        assert count(messages, messages=[ASKED]) == count(responses, input=[ASKED]) == thinking
        for path, more in (("/v1/chat/completions", {"max_tokens": 8}), ("/v1/messages", {"max_tokens": 8})):
            answer = serving.ask(path, {"model": "tiny", "messages": [ASKED], **more}).json
            said = answer["choices"][0]["message"] if "choices" in answer else answer["content"][0]
            assert said.get("reasoning_content") or said.get("thinking"), "the answer begins within its thought"


BUDGETS = [
    ("/v1/chat/completions", {"thinking_budget": 5}), ("/v1/chat/completions", {"thinking_token_budget": 5}),
    ("/v1/chat/completions", {"reasoning": {"max_tokens": 5}}), ("/v1/chat/completions", {"reasoning": {"budget": 5}}),
    ("/v1/chat/completions", {"reasoning_budget_tokens": 5}), ("/v1/chat/completions", {"thinking_budget_tokens": 5}),
    ("/v1/responses", {"reasoning": {"max_tokens": 5}}),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), BUDGETS)
def test_a_thinking_budget_holds_in_every_form(path, fields, caplog):
    asked = {"input": LONG} if "responses" in path else {"messages": LONG}
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    body = {"model": "tiny", **asked, limit: 40, "temperature": 0, **fields}
    with with_template(QWEN35) as serving:
        mark = serving.ask("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json["tokens"]
        answer = serving.ask(path, body)
        assert answer.status == 200, answer.body
        thought = find_thought(answer.json)
        count = len(serving.ask("/tokenize", {"prompt": thought, "add_special_tokens": False}).json["tokens"])
        assert thought and count <= 5 + len(mark)
        free = serving.ask(path, {name: value for name, value in body.items() if name not in fields}).json
        assert find_thought(free).startswith(thought) and len(find_thought(free)) > len(thought)
    with with_template(GEMMA) as serving:
        answer = serving.ask(path, body)
        if "thinking" in fields:
            assert answer.status == 200 and "thinking.budget_tokens for a model without thoughts" in caplog.text
        else:
            ((name, value),) = fields.items()
            param = name if isinstance(value, int) else f"{name}.{next(iter(value))}"
            assert answer.status == 400 and answer.error["param"] == param
            assert "needs a model whose thoughts have known marks" in answer.error["message"]


def find_thought(answer):
    """The thought of an answer in any form."""
    if "choices" in answer:
        return answer["choices"][0]["message"]["reasoning_content"]
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    return answer["content"][0]["thinking"]


@pytest.mark.parametrize(
    "fields", [{"enable_thinking": False}, {"reasoning": {"enabled": False}}, {"reasoning": {"effort": "none"}}]
)
def test_thinking_is_turned_off_at_the_top_level(fields):
    with with_template(QWEN35) as serving:
        prompt = serving.ask("/apply-template", {"messages": [ASKED], **fields}).json["prompt"]
        assert prompt.endswith("<think>\n\n</think>\n\n")


def test_two_budgets_are_refused():
    with with_template(QWEN35) as serving:
        reply = serving.chat([ASKED], thinking_budget=4, reasoning={"max_tokens": 5})
        assert reply.status == 400 and "means the same as thinking_budget" in reply.error["message"]
        assert serving.chat([ASKED], max_tokens=1, thinking_budget_tokens=-1).status == 200
        assert serving.chat([ASKED], thinking_token_budget=-2).error["param"] == "thinking_token_budget"
