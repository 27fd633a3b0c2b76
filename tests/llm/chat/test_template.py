"""Chat templates with several conventions, each in a few lines."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers import PreTrainedTokenizerFast

from pace.llm.chat import Tool
from pace.llm.chat.template import ChatTemplate, TemplateRefusal, special_tokens

TINY = Path(__file__).parents[3] / "pace" / "assets" / "tiny"
TOOL = Tool("get_weather", "Weather", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
TALK = [
    {"role": "user", "content": [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in Rome?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "sunny"},
]
LOOP = "{% for m in messages %}{{ m.role }}: {% BODY %}\n{% endfor %}"
KNOWS = "{% if tools %}{{ tools | tojson }}\n{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(TINY)


def rendered(tokenizer, body, knows=True, messages=TALK, **options):
    mine = copy.copy(tokenizer)
    mine.chat_template = (KNOWS if knows else "") + LOOP.replace("{% BODY %}", body)
    return ChatTemplate(mine, **options).render(messages, [TOOL])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template refuses these messages: roles must alternate",
        ),
        ("{{ m.role + 5 }}", "the chat template refuses these messages: TypeError: can only concatenate str"),
        ("{{ m.x.y }}", "the chat template refuses these messages: UndefinedError: "),
        ("\n{% if %}", "line 3 of the chat template is not Jinja: "),
    ],
)
def test_a_template_that_refuses_names_its_file(tokenizer, tmp_path, body, reason):
    mine = copy.copy(tokenizer)
    assert f"{tokenizer.name_or_path}/chat_template.jinja: {reason}" in refusal(mine, body)
    mine.name_or_path = str(tmp_path)
    assert refusal(mine, body).startswith(f"the tokenizer's chat_template: {reason}")
    (tmp_path / "tokenizer_config.json").touch()
    assert refusal(mine, body).startswith(f"{tmp_path}/tokenizer_config.json: {reason}")
    mine.name_or_path = str(tmp_path / "tokenizer_config.json")  # as for a GGUF file, which is itself the path
    assert refusal(mine, body).startswith(f"{tmp_path}/tokenizer_config.json: {reason}")


def refusal(tokenizer, body) -> str:
    with pytest.raises(TemplateRefusal) as caught:
        rendered(tokenizer, body)
    assert str(caught.value).endswith(caught.value.reason)
    return str(caught.value)


def test_the_bundled_model(tokenizer):
    template = ChatTemplate(tokenizer)
    text = template.render(TALK, [TOOL])
    assert "Tools: get_weather(city)" in text and "<|user|>Weather in Rome?<|end|>" in text
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>' in text
    assert text.endswith("<|tool|>sunny<|end|><|assistant|>")
    assert template.encode(TALK, [TOOL]) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert template.format.name == "hermes" and template.reasoning is None
    assert not template.render(TALK, [TOOL], begin_answer=False).endswith("<|assistant|>")
    said = [TALK[0], {"role": "assistant", "content": "It is"}]
    assert template.render(said, begin_answer=False, continue_answer=True).endswith("It is")
    assert special_tokens(tokenizer)["<tool_call>"] == tokenizer.convert_tokens_to_ids("<tool_call>")


def test_without_a_template():
    class Bare:
        chat_template = None

    with pytest.raises(ValueError, match="no chat template"):
        ChatTemplate(Bare())


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (
            "{{ m.content or '' }}{{ m.tool_calls[0].function | tojson if m.tool_calls }}",
            '"arguments": {"city": "Rome"}',
        ),
        (
            "{{ m.content or '' }}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
            "{{ f.name + ' ' + f.arguments }}{% endif %}",
            'get_weather {"city": "Rome"}',
        ),
        (
            "{{ m.content or '' }}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
            "{{ f.name ~ ' ' ~ f.arguments }}{% endif %}",
            'get_weather {"city": "Rome"}',
        ),
        (
            "{{ m.content + '!' }}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}",
            'assistant: !{"name": "get_weather", "arguments": {"city": "Rome"}}',
        ),
        (
            "{% if m.content is none %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}",
            '{"name": "get_weather", "arguments": {"city": "Rome"}}',
        ),
    ],
    ids=["object", "text", "text joined", "content is a string", "content is null"],
)
def test_a_template_gets_what_it_wants(tokenizer, body, shown):
    text = rendered(tokenizer, body)
    assert shown in text and "sunny" in text and "None" not in text


def test_a_template_that_leaves_calls_out(tokenizer):
    """Calls are written into the content, in the model's format."""
    text = rendered(tokenizer, '{{ m.content }}{# <tool_call> "arguments" #}')
    assert 'assistant: <tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "tool: sunny" in text


def test_a_template_that_knows_no_tools(tokenizer):
    """The first message describes the tools. Results are user messages if the template has no role for them."""
    body = "{{ raise_exception('no') if m.role not in ['user', 'assistant'] }}{{ m.content }}"
    text = rendered(tokenizer, body, knows=False)
    assert text.startswith('user: You may call these tools:\n{"name": "get_weather"') and "user: sunny" in text
    assert 'answer with nothing but\n{"name": "NAME", "arguments": ARGUMENTS}\n\nWeather in Rome?' in text
    text = rendered(tokenizer, "{{ m.content }}", knows=False)
    assert text.startswith("system: You may call these tools:") and "user: Weather in Rome?" in text
    asked = [{"role": "system", "content": "Be brief."}, *TALK]
    assert rendered(tokenizer, "{{ m.content }}", False, asked).startswith("system: Be brief.\n\nYou may call")


def test_ids_of_nine_characters(tokenizer):
    body = "{{ m.tool_calls[0].id if m.tool_calls }}{{ m.tool_call_id }}{{ m.content or '' }}{# [TOOL_CALLS] #}" \
        "{{ m.tool_calls[0].function | tojson if m.tool_calls }}"  # fmt: skip
    lines = rendered(tokenizer, body).splitlines()
    made = lines[2].removeprefix("assistant: ")[:9]
    assert made.isalnum() and lines[3] == f"tool: {made}sunny"
    own = [dict(TALK[1], tool_calls=[CALL | {"id": "abcDEF123"}]), dict(TALK[2], tool_call_id="abcDEF123")]
    assert "abcDEF123sunny" in rendered(tokenizer, body, messages=[TALK[0], *own])


@pytest.mark.parametrize(
    ("message", "place"),
    [({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\].content\[0\].*image_url"),
     ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"messages\[0\].tool_calls\[0\].function.name"),
     ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a'}}]},
       r"messages\[0\].tool_calls\[0\].function.arguments"),
     ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}, "JSON object"),
     ({"role": "user", "content": 5}, r"messages\[0\].content must be text"),
     ({"role": "assistant", "tool_calls": 5}, r"messages\[0\].tool_calls must be a list"),
     ({"content": "What?"}, r"messages\[0\] must have a role"), ("What?", r"messages\[0\] must be a dict")],
)  # fmt: skip
def test_messages_that_cannot_be_rendered(tokenizer, message, place):
    with pytest.raises((TypeError, ValueError), match=place):
        ChatTemplate(tokenizer).render([message])


def test_a_conversation_without_messages(tokenizer):
    for tools in ((), [TOOL]):
        with pytest.raises(ValueError, match="messages must hold one message at least"):
            ChatTemplate(tokenizer).render([], tools)


@pytest.mark.parametrize("messages", [{"role": "user", "content": "What?"}, "What?", None])
def test_what_is_no_list_of_messages(tokenizer, messages):
    with pytest.raises(TypeError, match="messages must be a list of dicts with role and content; got "):
        ChatTemplate(tokenizer).render(messages)


def test_enable_thinking_has_other_names(tokenizer):
    mine = copy.copy(tokenizer)
    for name, shown in (("enable_thinking", "True"), ("thinking", "True"), ("skip_reasoning", "False")):
        mine.chat_template = LOOP.replace("{% BODY %}", "{{ m.content }}") + "{{ " + name + " }}"
        template, variables = ChatTemplate(mine), {"enable_thinking": True}
        assert template.render(TALK[:1], variables=variables).endswith(shown)
        assert template.render(TALK[:1], variables=variables | {name: "low"}).endswith("low"), "what is given stays"
    mine.chat_template = LOOP.replace("{% BODY %}", "{{ m.content }}{{ m.thinking }}{{ thinking is defined }}")
    assert "False" in ChatTemplate(mine).render(TALK[:1]), "nothing is set that was not given"
