"""Whole turns of model families: how their templates show a conversation, and what is read from their answers.

The templates write thoughts, calls and results as the published ones do, in a few lines.
"""

from __future__ import annotations

import copy
import functools
import json

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("transformers")

from transformers import PreTrainedTokenizerFast

from pace.assets import TINY
from pace.llm.chat import Tool, ToolChoice, TurnParser, turn_grammar
from pace.llm.chat.template import ChatTemplate, TemplateRefusal
from pace.llm.chat.turn import plan_turn
from tests.llm.chat.grammars import accepts, special_names, vocabulary
from tests.llm.chat.turns import parse

FIRST = (
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
)
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
TAGGED = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ '\n' }}<function={{ c.function.name }}>{{ '\n' }}"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>{{ '\n' }}"
    "{{ value | tojson if value is mapping or value is sequence and value is not string else value | string }}"
    "{{ '\n' }}</parameter>{{ '\n' }}{% endfor %}</function>{{ '\n' }}</tool_call>{{ AFTER }}{% endfor %}"
)
"""Calls in Qwen3-Coder's form: a string as it is, a list or dict as JSON, and any other value as Python shows it."""
RESULTS = (
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{{ '\n' }}{% endif %}<tool_response>{{ '\n' }}{{ m.content }}"
    "{{ '\n' }}</tool_response>{{ '\n' if not loop.last and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}"
)
TAGGED_TOOLS = (
    "{% if tools %}{% for t in tools %}<function>{{ t.function.name }}</function>{% for key, p in "
    "t.function.parameters.properties | items %}<parameter>{{ key }}: {{ p.type }}</parameter>{% endfor %}"
    "{% endfor %}<tool_call>{{ '\n' }}<function=f>{{ '\n' }}<parameter=p>...{% endif %}"
)

QWEN35 = (
    "{{ raise_exception('No user query') if 'user' not in messages | map(attribute='role') }}"
    + FIRST
    + LAST_QUESTION
    + "{% if tools or first %}<|im_start|>system{{ '\n' }}"
    + TAGGED_TOOLS
    + "{{ first }}<|im_end|>{{ '\n' }}{% endif %}{% for m in rest %}"
    "{% if m.role == 'system' %}{{ raise_exception('System message must be first') }}"
    "{% elif m.role == 'user' %}<|im_start|>user{{ '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant{{ '\n' }}"
    "{% if loop.index0 > ns.last or preserve_thinking %}<think>{{ '\n' + (m.reasoning_content or '') | trim + '\n' }}"
    "</think>{{ '\n\n' }}{% endif %}{{ m.content or '' }}"
    + TAGGED.replace("AFTER", "'' if loop.last else '\n'")
    + "<|im_end|>{{ '\n' }}{% elif m.role == 'tool' %}"
    + RESULTS
    + "{% else %}{{ raise_exception('Unexpected role') }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant{{ '\n' }}{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}"
    "{% endif %}"
)
"""Qwen 3.5 and later: the prompt begins the thought, and thoughts before the last question are dropped."""

QWEN_CODER = (
    FIRST + "<|im_start|>system{{ '\n' + first }}" + TAGGED_TOOLS + "<|im_end|>{{ '\n' }}"
    "{% for m in rest %}{% if m.role == 'assistant' and m.tool_calls %}"
    "<|im_start|>assistant{{ '\n' }}{% if m.content is string and m.content %}{{ m.content + '\n' }}{% endif %}"
    + TAGGED.replace("AFTER", "'' if loop.last else '\n'")
    + "<|im_end|>{{ '\n' }}{% elif m.role == 'tool' %}"
    + RESULTS
    + "{% else %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""Qwen3-Coder, without thoughts. Messages other than calls must have text as their content."""

NEMOTRON3 = (
    FIRST
    + LAST_QUESTION
    + "<|im_start|>system{{ '\n' + first }}"
    + TAGGED_TOOLS
    + "<|im_end|>{{ '\n' }}{% set truncates = truncate_history_thinking | default(true) %}{% for m in rest %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant{{ '\n' }}"
    "{% if m.reasoning_content and not (truncates and loop.index0 < ns.last) %}"
    "<think>{{ '\n' + m.reasoning_content + '\n' }}</think>{{ '\n' }}{% else %}<think></think>{% endif %}"
    "{{ m.content or '' }}"
    + TAGGED.replace("AFTER", "'\n'")
    + "<|im_end|>{{ '\n' }}{% elif m.role == 'tool' %}"
    + RESULTS
    + "{% else %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}"
    "{{ '<think></think>' if enable_thinking is false else '<think>\n' }}{% endif %}"
)
"""Nemotron 3: as Qwen 3.5, with an empty thought in place of each one that is dropped."""

LISTED = "{% if tools %}List of tools: MARKS[{{ tools | map('tojson') | join(', ') }}]MARKE{% endif %}"
"""A list of tools as in LFM2, in the system turn."""
LFM2 = (
    FIRST
    + "<|startoftext|>{% if tools or first %}<|im_start|>system{{ '\n' + first }}"
    + LISTED.replace("MARKS", "<|tool_list_start|>").replace("MARKE", "<|tool_list_end|>")
    + "<|im_end|>{{ '\n' }}{% endif %}{% for m in rest %}"
    "<|im_start|>{{ m.role + '\n' }}{% set content = m.content if m.content is string else m.content | tojson %}"
    "{{ '<|tool_response_start|>' + content + '<|tool_response_end|>' if m.role == 'tool' else content }}"
    "<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""LFM2, whose template knows no calls: they are part of the content."""

LFM25 = (
    FIRST
    + LAST_QUESTION
    + "<|startoftext|>{% if tools or first %}<|im_start|>system{{ '\n' + first }}"
    + LISTED.replace("MARKS", "").replace("MARKE", "")
    + "<|im_end|>{{ '\n' }}{% endif %}{% for m in rest %}"
    "<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% if m.thinking and (loop.index0 > ns.last or preserve_thinking) %}<think>{{ m.thinking }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for key, value in c.function.arguments.items() %}{{ key }}="
    '{{ "\'" + value + "\'" if value is string else value | tojson if value is mapping else value | string }}'
    "{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]<|tool_call_end|>"
    "{% endif %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""LFM2.5, which shows values of calls as Python does, and calls reasoning `thinking`."""

LFM25_THINKING = LFM2.replace(
    "{{ '<|tool_response_start|>'",
    "{% if m.role == 'assistant' and not keep_past_thinking and rest[loop.index0 + 1:] | selectattr('role', 'equalto', "
    "'assistant') | list %}{% set content = content.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '<|tool_response_start|>'",
)
"""LFM2.5 as first published: thoughts are part of the content, and only the last answer keeps its own."""

GRANITE4 = (
    FIRST
    + "<|start_of_role|>system<|end_of_role|>{{ first }}{% if tools %}<tools>{{ tools | map('tojson') | join('\n') }}"
    '</tools><tool_call>{{ \'\n{"name": <function-name>, "arguments": <args-json-object>}\n\' }}</tool_call>{% endif %}'
    "<|end_of_text|>{{ '\n' }}{% for m in rest %}"
    "{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|start_of_role|>user<|end_of_role|>{% endif %}"
    "{{ '\n' }}<tool_response>{{ '\n' + m.content + '\n' }}</tool_response>"
    "{{ '<|end_of_text|>\n' if loop.last or loop.nextitem.role != 'tool' }}"
    "{% else %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first }}<tool_call>{{ '\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{{ '}\n' }}"
    "</tool_call>{% endfor %}<|end_of_text|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

FAMILIES = {
    "qwen35": QWEN35, "qwen_coder": QWEN_CODER, "nemotron3": NEMOTRON3, "lfm2": LFM2, "lfm25": LFM25,
    "lfm25_thinking": LFM25_THINKING, "granite4": GRANITE4,
}  # fmt: skip

LIST = {"type": "array", "items": {"type": "string"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "is_near": {"type": "boolean"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": LIST,
        "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
    },
    "required": ["city"],
}
TOOLS = [Tool("weather", "The weather", SCHEMA), Tool("time", "The time")]
QUESTION = {"role": "user", "content": "Weather?"}
SYSTEM = {"role": "system", "content": "Be brief."}
FORMS = {"qwen35": "qwen_coder", "qwen_coder": "qwen_coder", "nemotron3": "qwen_coder", "lfm2": "lfm2", "lfm25": "lfm2",
         "lfm25_thinking": "lfm2", "granite4": "hermes"}  # fmt: skip
ENDS = {"granite4": "<|end_of_text|>"}
BEGUN = ("qwen35", "nemotron3")
"""Families whose prompt begins a thought."""


@functools.cache
def template(family: str) -> ChatTemplate:
    tokenizer = copy.copy(PreTrainedTokenizerFast.from_pretrained(TINY))
    tokenizer.chat_template = FAMILIES[family]
    return ChatTemplate(tokenizer)


def call(name: str, as_text: bool = True, **arguments) -> dict:
    written = json.dumps(arguments) if as_text else arguments
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": written}}


def asks(*calls: dict, content: str | None = None, thought: str | None = None) -> dict:
    more = {} if thought is None else {"reasoning_content": thought}
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def says(content: str, thought: str) -> dict:
    return {"role": "assistant", "content": content, "reasoning_content": thought}


def result(name: str) -> dict:
    return {"role": "tool", "tool_call_id": f"call_{name}", "name": name, "content": f"{name} is fine"}


TWO = asks(call("weather", city="Rome", days=3), call("time"), thought="Hm.")
TALK = [SYSTEM, QUESTION, TWO, result("weather"), result("time")]
ROME = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n" \
    "</function>\n</tool_call>"  # fmt: skip
NOW = "<tool_call>\n<function=time>\n</function>\n</tool_call>"
TOLD = "<|im_start|>user\n<tool_response>\nweather is fine\n</tool_response>\n" \
    "<tool_response>\ntime is fine\n</tool_response><|im_end|>\n<|im_start|>assistant\n"  # fmt: skip
PYTHON = "<|tool_call_start|>[weather(city='Rome', days=3), time()]<|tool_call_end|><|im_end|>\n"
SHOWN = {
    "qwen35": f"<|im_start|>assistant\n<think>\nHm.\n</think>\n\n{ROME}\n{NOW}<|im_end|>\n{TOLD}<think>\n",
    "qwen_coder": f"<|im_start|>assistant\n{ROME}\n{NOW}<|im_end|>\n{TOLD}",
    "nemotron3": f"<|im_start|>assistant\n<think>\nHm.\n</think>\n{ROME}\n{NOW}\n<|im_end|>\n{TOLD}<think>\n",
    "lfm2": f"<|im_start|>assistant\n{PYTHON}<|im_start|>tool\n<|tool_response_start|>weather is fine"
    "<|tool_response_end|><|im_end|>\n<|im_start|>tool\n<|tool_response_start|>time is fine<|tool_response_end|>"
    "<|im_end|>\n<|im_start|>assistant\n",
    "lfm25": f"<|im_start|>assistant\n<think>Hm.</think>{PYTHON}<|im_start|>tool\nweather is fine<|im_end|>\n"
    "<|im_start|>tool\ntime is fine<|im_end|>\n<|im_start|>assistant\n",
    "lfm25_thinking": f"<|im_start|>assistant\n<think>\nHm.\n</think>\n\n{PYTHON}<|im_start|>tool\n"
    "<|tool_response_start|>weather is fine<|tool_response_end|><|im_end|>\n<|im_start|>tool\n"
    "<|tool_response_start|>time is fine<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n",
    "granite4": '<|start_of_role|>assistant<|end_of_role|><tool_call>\n{"name": "weather", "arguments": {"city": '
    '"Rome", "days": 3}}\n</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|end_of_text|>\n'
    "<|start_of_role|>user<|end_of_role|>\n<tool_response>\nweather is fine\n</tool_response>\n<tool_response>\n"
    "time is fine\n</tool_response><|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_and_results_as_the_template_shows_them(family):
    assert template(family).format.name == FORMS[family]
    text = template(family).render(TALK, TOOLS)
    _, question, rest = text.partition(f"Weather?{ENDS.get(family, '<|im_end|>')}\n")
    assert question and rest == SHOWN[family]
    as_objects = [*TALK[:2], asks(call("weather", False, city="Rome", days=3), call("time"), thought="Hm."), *TALK[3:]]
    assert template(family).render(as_objects, TOOLS) == text


VALUES = [
    {"city": "Rome"}, {"city": "", "tags": []}, {"city": "a\n\nb", "days": -3, "is_near": True, "unit": None},
    {"city": "x < y </parameter", "is_near": False, "unit": "C"}, {"city": "{}", "tags": ["a", "b c"]},
    {"city": "true", "unit": "nothing", "where": {"lat": 0.5}}, {"city": "12", "days": 0, "tags": ["]", "1"]},
    {"city": "Zürich 🦊"},
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_of_the_history_is_one_of_the_grammar(family):
    """Models write calls as the template shows earlier ones. The grammar allows these, and the parser reads them."""
    found = template(family)
    words = vocabulary((*special_names(found.format), "<think>", "</think>"))
    grammars = {mode: turn_grammar(found.format, TOOLS, ToolChoice(mode, names), special=words.special)
                for mode, names in (("auto", None), ("required", None), ("named", ("weather",)))}  # fmt: skip
    for values in VALUES:
        if family == "lfm25" and "\n" in values["city"]:
            continue  # this template does not escape strings
        for count in (1, 2):
            calls = [call("weather", **values), call("time")][:count]
            text = found.render([QUESTION, asks(*calls), result("weather")], TOOLS)
            text = text.split("Weather?")[1].split("assistant", 1)[1].split(ENDS.get(family, "<|im_end|>"))[0]
            text = text.removeprefix("<|end_of_role|>").replace("<think></think>", "").split("</think>")[-1].lstrip()
            for mode, grammar in grammars.items():
                is_allowed = mode != "named" or count == 1
                assert accepts(grammar, words, words.encode(text)) == is_allowed, (mode, text)
            whole = parse(TurnParser(found.format, TOOLS), text)
            assert whole.calls[0][0] == "weather" and json.loads(whole.calls[0][1]) == values, text
            assert whole.ended == list(range(count)) and not whole.text
            assert parse(TurnParser(found.format, TOOLS), text, range(len(text))).calls == whole.calls


@pytest.mark.parametrize("family", BEGUN)
@pytest.mark.parametrize("mode", ["none", "auto", "required", "named"])
def test_an_answer_that_begins_within_its_thought(family, mode):
    choice = ToolChoice(mode, ("time",) if mode == "named" else None)
    turn = plan_turn(template(family), [QUESTION], TOOLS, choice)
    assert turn.prompt.endswith("<|im_start|>assistant\n<think>\n") and turn.reasoning.begun
    answer = f"Hm, {NOW}?\n</think>\n\n" + ("Fine." if mode == "none" else NOW)
    whole = parse(turn.parser(), answer)
    assert whole.thought == f"Hm, {NOW}?" and whole.text == ("Fine." if mode == "none" else "")
    assert whole.calls == ([] if mode == "none" else [["time", "{}"]])
    letters = parse(turn.parser(), answer, range(len(answer)))
    assert (letters.thought, letters.text, letters.calls) == (whole.thought, whole.text, whole.calls)
    bare = parse(turn.parser(), answer[: -len(NOW)] + NOW.removeprefix("<tool_call>\n"))
    assert bare.calls == (whole.calls if mode == "auto" else []), "a call without its outer opening tag"
    assert parse(turn.parser(), "Hm, \n").thought == "Hm, \n", "a thought that is cut"


ANSWERS = {
    "qwen35": f"Hm.\n</think>\n\nI look.{ROME}\n{NOW}",
    "nemotron3": f"Hm.\n\nSo.\n</think>\nI look.{ROME}\n{NOW}\n",
    "lfm25": "<think>Hm.</think>I look.<|tool_call_start|>[weather(city='Rome', days=3), time()]<|tool_call_end|>",
    "granite4": 'I look.\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
}


@pytest.mark.parametrize("family", ANSWERS)
def test_the_next_prompt_begins_with_the_last_one_and_its_answer(family):
    """The cache can then use all of it: what was read from an answer is rendered as it was written."""
    turn = plan_turn(template(family), [QUESTION], TOOLS)
    whole = parse(turn.parser(), ANSWERS[family])
    names = [name for name, _ in whole.calls]
    calls = [call(name, **json.loads(arguments)) for name, arguments in whole.calls]
    said = asks(*calls, content=whole.text.strip() or None, thought=whole.thought)
    following = template(family).render([QUESTION, said, *map(result, names)], TOOLS)
    assert following.startswith(turn.prompt + ANSWERS[family] + ENDS.get(family, "<|im_end|>"))


@pytest.mark.parametrize(
    ("family", "end"), [("qwen35", "<think>\n\n</think>\n\n"), ("nemotron3", "<think></think>"), ("lfm25", ""),
                        ("qwen_coder", ""), ("granite4", "")],
)  # fmt: skip
def test_thinking_that_is_turned_off(family, end):
    turn = plan_turn(template(family), [QUESTION], TOOLS, variables={"enable_thinking": False})
    assert turn.prompt.endswith(("assistant\n", "<|end_of_role|>")[family == "granite4"] + end)
    assert turn.reasoning is None or family == "lfm25"
    whole = parse(turn.parser(), "Fine.")
    assert (whole.thought, whole.text) == ("", "Fine.")


PAST = [QUESTION, says("Fine.", "Past."), QUESTION, asks(call("time"), thought="First."), result("time"),
        asks(call("time"), thought="Second."), result("time")]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "variables", "thoughts"),
    [("qwen35", {}, "First. Second."), ("qwen35", {"preserve_thinking": True}, "Past. First. Second."),
     ("nemotron3", {}, "First. Second."),
     ("nemotron3", {"truncate_history_thinking": False}, "Past. First. Second."),
     ("lfm25", {}, "First. Second."), ("lfm25", {"preserve_thinking": True}, "Past. First. Second."),
     ("lfm25_thinking", {}, "Second."), ("lfm25_thinking", {"keep_past_thinking": True}, "Past. First. Second."),
     ("lfm2", {}, ""), ("granite4", {}, "")],
)  # fmt: skip
def test_thoughts_of_earlier_answers(family, variables, thoughts):
    text = template(family).render(PAST, TOOLS, variables=variables)
    assert [word for word in ("Past.", "First.", "Second.") if word in text] == thoughts.split()
    assert "Fine." in text
    going_on = [*PAST[:1], says("It is", "Past.")]
    text = template(family).render(going_on, TOOLS, False, True, variables)
    assert ("Past." in text) == (family not in ("lfm2", "granite4")), "the thought of an answer that goes on"
    assert text.endswith("It is") or family == "nemotron3" and text.endswith("</think>\nIt is")


def test_a_template_that_needs_a_question():
    assert "<|im_start|>user\nBe brief.<|im_end|>" in template("qwen35").render([SYSTEM])
    with pytest.raises(TemplateRefusal, match="No user query"):
        template("qwen35").render([says("Fine.", "Past.")])
