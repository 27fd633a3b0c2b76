"""Conversations over HTTP for models with other templates: the prompt contains everything, or the answer is 400."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from tests.llm.chat.test_manners import CALLS, GEMMA, GUARD, IGNORES, in_order
from tests.server.serving import Serving, shared_generator

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
