"""Thinking budgets in conversations: what follows a thought that was ended is an answer, JSON or a call."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance")

from pace.assets import TINY
from pace.llm import SamplingConfig
from pace.llm.chat import Text, Thought
from pace.tokenizer.loading import load_tokenizer
from tests.llm.chat.test_families import NEMOTRON3, QWEN35
from tests.llm.generation.scripted import say, scripted
from tests.llm.generators import check_idle

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA |= {"additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
ASKED = [{"role": "user", "content": "Well?"}]


@pytest.fixture(params=[True, False], ids=["one token", "many"])
def tokenizer(request):
    tokenizer = load_tokenizer(TINY)
    if request.param:
        tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"], special_tokens=False)
    return tokenizer


def asked(generator, thought: str, rest: str, template: str = QWEN35, **options):
    """The answer of a model that thinks `thought`, then says `rest`. `thinking_budget` counts all tokens of the
    thought but the last three."""
    tokenizer = generator.tokenizer
    tokenizer.chat_template = template
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    thoughts = encode(thought)
    budget = len(thoughts) - 3
    prompt = tokenizer.apply_chat_template(ASKED, options.get("tools"), add_generation_prompt=True, return_dict=False)
    mark = encode("</think>")
    say(generator, prompt, thoughts[:budget] + mark + encode(rest))
    answer = generator.chat(ASKED, thinking_budget=budget, do_sample=False, **options)
    events = list(answer)
    free = tokenizer.decode(thoughts[:budget])
    assert "".join(event.text for event in events if isinstance(event, Thought)).rstrip() == free.rstrip()
    return answer.output, "".join(event.text for event in events if isinstance(event, Text))


THOUGHT = "They ask about the weather, so I look, and then I think a bit more about it."


def test_an_answer_follows(tokenizer) -> None:
    generator = scripted(tokenizer)
    output, text = asked(generator, THOUGHT, "\n\nIt is sunny.")
    assert output.text == text == "It is sunny." and output.finish_reason == "stop"
    check_idle(generator)


@pytest.mark.parametrize("template", [QWEN35, NEMOTRON3])
def test_json_and_calls_follow(tokenizer, template) -> None:
    """The grammar holds after the mark that the budget forces, and the mark is a part of it."""
    generator = scripted(tokenizer)
    output, text = asked(generator, THOUGHT, '\n\n{"city": "Rome"}', template, json_schema=SCHEMA)
    assert json.loads(text) == {"city": "Rome"} and output.finish_reason == "stop"
    for choice in ("auto", "required"):
        output, _ = asked(generator, THOUGHT, f"\n\n{CALL}", template, tools=TOOLS, tool_choice=choice)
        assert [(call.name, json.loads(call.arguments)) for call in output.tool_calls] == [
            ("weather", {"city": "Rome"})
        ]
    check_idle(generator)


def test_a_budget_of_nothing_and_one_that_is_never_reached(tokenizer) -> None:
    generator = scripted(tokenizer)
    tokenizer.chat_template = QWEN35
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    say(generator, prompt, encode("</think>") + encode("\n\nYes."))
    for budget in (0, 100):
        output = generator.chat(ASKED, SamplingConfig(thinking_budget=budget, do_sample=False)).output
        assert (output.thought, output.text) == ("", "Yes.")


def test_thoughts_that_are_turned_off_need_no_budget(tokenizer) -> None:
    generator = scripted(tokenizer)
    tokenizer.chat_template = QWEN35
    variables = {"enable_thinking": False}
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False, **variables)
    say(generator, prompt, tokenizer("It is sunny today, in all of it.", add_special_tokens=False)["input_ids"])
    config = SamplingConfig(thinking_budget=1, do_sample=False)
    output = generator.chat(ASKED, config, template_variables=variables).output
    assert (output.thought, output.text) == ("", "It is sunny today, in all of it.")
