"""Nodes of tool calls: made in the model's own format, and answered by its own template."""

from __future__ import annotations

import json
import re

import pytest
from guidance import assistant, gen, system, user
from guidance._ast import ToolCallNode
from guidance._tools import Tool

from pace.integrations.guidance import Pace


def get_weather(city: str) -> str:
    """The weather in a city, now."""
    return f"sunny, {20 + len(city)} degrees"


def ask(lm, question="What is the weather in Rome?"):
    with user():
        return lm + question


def test_a_call_is_made_and_answered(lm):
    lm = ask(lm)
    with assistant():
        lm += gen(tools=[get_weather])
        lm += gen("answer", max_tokens=30)
    assert '"arguments": {"city": "Rome"}' in str(lm) and "sunny, 24 degrees" in str(lm)
    assert "24" in lm["answer"]


def test_the_model_reads_what_its_template_writes(lm, model):
    """Tools are placed as in the template, and the conversation continues as if it had been rendered whole."""
    from pace.llm.chat import read_tools
    from pace.llm.chat.template import ChatTemplate

    with system():
        lm += "Answer briefly."
    lm = ask(lm)
    with assistant():
        lm += gen(tools=[get_weather])
        state = lm._interpreter.state
    tools = read_tools([Tool.from_callable(get_weather).to_openai_style()])
    rendered = ChatTemplate(model.tokenizer).render(state.messages, tools)
    assert state.read == rendered and "get_weather" in rendered
    assert [message["role"] for message in state.messages] == ["system", "user", "assistant", "tool"]
    assert str(lm).startswith("<|system|>Answer briefly.<|end|><|user|>"), "what is shown is what was written"


def test_a_second_question(lm):
    lm = ask(lm)
    with assistant():
        lm += gen(tools=[get_weather]) + gen(max_tokens=30)
    lm = ask(lm, "What is the weather in Paris?")
    with assistant():
        lm += gen(tools=[get_weather])
        lm += gen("answer", max_tokens=30)
    assert "sunny, 25 degrees" in str(lm) and "25" in lm["answer"]


def test_a_call_is_demanded(lm):
    lm = ask(lm, "Tell me a story.")
    node = ToolCallNode.from_tools([get_weather], tool_choice="required")
    with assistant():
        lm += node
    calls = [message for message in lm._interpreter.state.messages if message.get("tool_calls")]
    (call,) = calls[0]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"city"}


def test_text_is_text(lm):
    lm = ask(lm, "What is the capital of Japan?")
    with assistant():
        lm += gen(tools=[get_weather])
    assert "Tokyo" in str(lm) and "sunny" not in str(lm)


def test_a_tool_that_fails_says_so_to_the_model(lm):
    def broken(city: str):
        raise KeyError("no such city")

    tool = Tool.from_callable(broken, name="get_weather")
    lm = ask(lm)
    with assistant():
        lm += ToolCallNode.from_tools([tool], tool_choice="required")
    assert "no such city" in str(lm)


def test_results_that_are_no_text_are_json(lm):
    def get_weather(city: str):
        return {"city": city, "degrees": 24}

    lm = ask(lm)
    with assistant():
        lm += ToolCallNode.from_tools([get_weather], tool_choice="required")
    assert '"degrees": 24}' in str(lm)


def test_branches_and_batches_of_calls(lm):
    def question(city):
        def program(lm):
            lm = ask(lm, f"What is the weather in {city}?")
            with assistant():
                return lm + gen(tools=[get_weather]) + gen("answer", max_tokens=20)

        return program

    cities = ["Rome", "Paris", "Madrid"]
    alone = [str(question(city)(lm)) for city in cities]
    assert [str(out) for out in lm.batch([question(city) for city in cities])] == alone
    assert all(f"sunny, {20 + len(city)} degrees" in text for city, text in zip(cities, alone))


def test_what_cannot_be_called(lm, model):
    with pytest.raises(ValueError, match="turn of the assistant"):
        lm + gen(tools=[get_weather])
    outside = lm + "A title. "
    outside = ask(outside)
    with pytest.raises(ValueError, match="no text outside"), assistant():
        outside + gen(tools=[get_weather])
    lm = ask(lm)
    custom = Tool.from_regex("[0-9]+", lambda text: text, name="number")
    with pytest.raises(NotImplementedError, match="only functions"), assistant():
        lm + ToolCallNode.from_tools([custom])
    with pytest.raises(NotImplementedError, match="plaintext_regex"), assistant():
        lm + ToolCallNode.from_tools([get_weather], plaintext_regex="a*")


HERMES = '<tool_call>{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}</tool_call>'
MISTRAL = '{{ {"name": c.function.name, "arguments": c.function.arguments, "id": c.id} | tojson }}'
LLAMA3 = '{{ {"name": c.function.name, "parameters": c.function.arguments} | tojson }}'
FORMS = {
    "hermes": "{% for c in m.tool_calls %}" + HERMES + "{% endfor %}<|eom|>\n",
    "mistral": "[TOOL_CALLS][{% for c in m.tool_calls %}" + MISTRAL + "{% endfor %}]</s>",
    "llama3": "{% for c in m.tool_calls %}" + LLAMA3 + "{% endfor %}<|eot|>",
}


@pytest.mark.parametrize("name", FORMS)
def test_calls_of_other_forms_end_as_their_template_ends_them(model, monkeypatch, name):
    """These templates end a turn of calls differently from a turn of text."""
    from pace.llm.chat import format_named, read_tools
    from pace.llm.chat.template import ChatTemplate

    monkeypatch.setattr(ChatTemplate, "format", format_named(name))
    template = (
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{% if m.tool_calls %}" + FORMS[name] + "{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    lm = ask(Pace(model, echo=False, chat_template=template))
    with assistant():
        lm += ToolCallNode.from_tools([get_weather], tool_choice="required")
        state = lm._interpreter.state
    tools = read_tools([Tool.from_callable(get_weather).to_openai_style()])
    rendered = ChatTemplate(lm.engine.hf_tokenizer).render(state.messages, tools)
    assert without_blanks_and_ids(state.read) == without_blanks_and_ids(rendered)
    lm.close()


def without_blanks_and_ids(text):
    return re.sub(r'"id":"\w{9}"', "ID", "".join(text.split()))


def test_a_template_that_knows_no_tools(model):
    template = (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    lm = ask(Pace(model, echo=False, chat_template=template))
    with assistant():
        lm += ToolCallNode.from_tools([get_weather], tool_choice="required")
    assert "sunny, " in str(lm) and "get_weather" in lm._interpreter.state.read.partition("weather in Rome")[0]
    lm.close()
