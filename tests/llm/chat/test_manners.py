"""Conversations rendered by templates like those of models. The text contains the whole conversation, even if the
template does not support all kinds of messages.

The templates have the structure of the named ones, in a few lines.
"""

from __future__ import annotations

import copy
import itertools

import pytest

pytest.importorskip("transformers")

from transformers import PreTrainedTokenizerFast

from pace.assets import TINY
from pace.llm.chat import Tool
from pace.llm.chat.template import ChatTemplate, TemplateRefusal

TOOLS = [Tool(name, "", {"type": "object", "properties": {"city": {"type": "string"}}}) for name in ("weather", "time")]
STRICT = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" \
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"  # fmt: skip
KNOWS = "{% if tools %}{{ tools | tojson }}\n{% endif %}"

TEXT = "{{ m.content }}"
PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
SELECTED = "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
FIRST = "{{ m.content[0].text }}"
FIRST_KEYED = "{{ m['content'][0]['text'] + '' }}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
CONTENTS = {"text": TEXT, "parts": PARTS, "selected": SELECTED, "first": FIRST, "keyed": FIRST_KEYED, "either": EITHER}


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(TINY)


@pytest.fixture
def render(tokenizer):
    def render(template, messages, tools=(), **options):
        mine = copy.copy(tokenizer)
        mine.chat_template = template
        return ChatTemplate(mine).render(messages, tools, **options)

    return render


def say(role, content, **others):
    return {"role": role, "content": content, **others}


def call(name, city, id=""):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"city": "%s"}' % city}}


def asks(count, content=None, ids=True):
    calls = [call(("weather", "time")[k % 2], f"city{k}", f"call_{k}" if ids else "") for k in range(count)]
    return say("assistant", content, tool_calls=calls)


def results(count, order=None, ids=True):
    return [say("tool", f"result{k}", **({"tool_call_id": f"call_{k}"} if ids else {})) for k in order or range(count)]


def in_order(text, *words):
    places = [text.find(word) for word in words]
    assert -1 not in places, f"{words[places.index(-1)]} is not in {text!r}"
    assert places == sorted(places), f"{words} are not in order in {text!r}"
    assert all(text.count(word) == 1 for word in words), f"a word of {words} is there twice in {text!r}"


@pytest.mark.parametrize(("user", "assistant"), list(itertools.product(CONTENTS, CONTENTS)))
def test_content_comes_in_the_form_of_each_role(render, user, assistant):
    body = "{% if m.role == 'assistant' %}" + CONTENTS[assistant] + "{% else %}" + CONTENTS[user] + "{% endif %}"
    for first in ("", STRICT):
        template = first + "{% for m in messages %}<{{ m.role }}>" + body + "{% endfor %}"
        parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "much?"}]
        talk = [say("user", parts), say("assistant", "A lot."), say("user", "Why?")]
        assert render(template, talk) == "<user>How much?<assistant>A lot.<user>Why?"
        assert render(template, [say("user", "")]) == "<user>"
        if not first:
            assert render(template, [say("system", "Be kind."), talk[0]]) == "<system>Be kind.<user>How much?"
        goes_on = render(template, talk[:2], begin_answer=False, continue_answer=True)
        assert goes_on == "<user>How much?<assistant>A lot."


@pytest.mark.parametrize("content", CONTENTS)
def test_results_and_systems_in_either_form(render, content):
    template = KNOWS + "{% for m in messages %}<{{ m.role }}>{% if m.role in ('tool', 'system') %}"
    template += CONTENTS[content] + "{% else %}{{ m.content or '' }}{% endif %}"
    template += "{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
    text = render(template, [say("system", "Be kind."), say("user", "Well?"), asks(2), *results(2)], TOOLS)
    in_order(text, "<system>Be kind.", "<user>Well?", "city0", "city1", "<tool>result0", "<tool>result1")


GUARD = STRICT + "Check this.\n{% for m in messages %}{% set role = 'Agent' if m.role == 'assistant' else 'User' %}" \
    "{{ role }}: " + SELECTED + " {% endfor %}"  # fmt: skip


def test_a_guard_reads_what_it_guards(render):
    text = render(GUARD, [say("user", "How do I steal?"), say("assistant", "Do not.")])
    assert text == "Check this.\nUser: How do I steal? Agent: Do not. "


GEMMA = "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}" + STRICT \
    + "{% for m in messages %}<{{ 'model' if m.role == 'assistant' else m.role }}>" \
    + "{{ m.content | trim }}\n{% endfor %}"  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_where_roles_alternate(render, count):
    talk = [
        say("user", "Well?"),
        asks(count, "I look."),
        *results(count),
        say("assistant", "Fine."),
        say("user", "More!"),
    ]
    text = render(GEMMA, talk, TOOLS)
    cities, told = [f"city{k}" for k in range(count)], [f"result{k}" for k in range(count)]
    in_order(text, "Well?", "<model>I look.", *cities, *told, "<model>Fine.", "<user>More!")
    assert text.count("<user>") == 3
    in_order(render(GEMMA, [*talk[: 2 + count], say("user", "And?")], TOOLS), *cities, *told, "And?")


def test_a_clients_own_turns_are_not_merged(render):
    for talk in ([say("user", "One?"), say("user", "Two?")],
                 [say("user", "One?"), asks(1), *results(1), say("user", "Two?"), say("user", "Three?")],
                 [say("user", "One?"), say("assistant", "Yes."), say("assistant", "No.")]):  # fmt: skip
        with pytest.raises(TemplateRefusal, match="refuses these messages: roles must alternate"):
            render(GEMMA, talk, TOOLS)


def shows(calls, results=True, content="m.content or ''"):
    """Returns a template that renders calls with the expression `calls`."""
    tool = "" if results else "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    return KNOWS + "{% for m in messages %}" + tool + "<{{ m.role }}>{% if m.tool_calls %}" + calls \
        + "{% else %}{{ " + content + " }}{% endif %}\n{% endfor %}"  # fmt: skip


ONE = "{% set f = X.function %}{{ f.name }}({{ f.arguments | tojson }})"
SINGLE = "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once!') }}{% endif %}"
CALLS = {
    "all": shows("{% for c in m.tool_calls %}" + ONE.replace("X", "c") + "{% endfor %}"),
    "first": shows(ONE.replace("X", "m.tool_calls[0]")),
    "last": shows(ONE.replace("X", "m.tool_calls[-1]")),
    "last of a loop": shows(
        "{% for c in m.tool_calls %}{% if loop.last %}" + ONE.replace("X", "c") + "{% endif %}{% endfor %}"),
    "two": shows("{% for c in m.tool_calls[:2] %}" + ONE.replace("X", "c") + "{% endfor %}"),
    "single": shows(SINGLE + ONE.replace("X", "m.tool_calls[0]")),
    "none": shows("{{ m.content or '' }}"),
    "no results": shows("{% for c in m.tool_calls %}" + ONE.replace("X", "c") + "{% endfor %}", results=False),
    "of the last message": KNOWS + "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% if m.tool_calls and loop.last %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}",
    "last result": KNOWS + "{% for m in messages %}"
    "{% if m.role != 'tool' or loop.last or messages[loop.index].role != 'tool' %}"
    "<{{ m.role }}>{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls }}\n{% endif %}{% endfor %}",
    "strict": STRICT + shows("{{ m.tool_calls | tojson }}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("content", [None, "I look."])
def test_no_call_is_lost(render, kind, count, content):
    said = [content] if content else []
    cities, told = [f"city{k}" for k in range(count)], [f"result{k}" for k in range(count)]
    for ids, order in ((True, None), (True, range(count)[::-1]), (False, None)):
        talk = [say("user", "Well?"), asks(count, content, ids), *results(count, order, ids)]
        for more in ([], [say("assistant", "Fine."), say("user", "More!")]):
            text = render(CALLS[kind], talk + more, TOOLS)
            in_order(text, *said, *cities)
            in_order(text, "Well?", *(word["content"] for word in more))
            for city, result in zip(cities, told):
                in_order(text, city, result)
        in_order(render(CALLS[kind], talk[:2], TOOLS), *said, *cities)


@pytest.mark.parametrize("kind", ["first", "last", "single"])
def test_calls_apart_have_their_results_behind_them(render, kind):
    talk = [say("user", "Well?"), asks(3), *results(3, (2, 0, 1)), say("assistant", "Fine.")]
    in_order(render(CALLS[kind], talk, TOOLS), "city0", "result0", "city1", "result1", "city2", "result2", "Fine.")


def test_one_manner_for_calls_that_a_template_takes(render):
    """A template that can render all of the calls is used unchanged."""
    text = render(CALLS["all"], [say("user", "Well?"), asks(2), *results(2)], TOOLS)
    calls = '<assistant>weather({"city": "city0"})time({"city": "city1"})<tool>result0<tool>result1'
    assert text.endswith(calls)


def test_a_result_has_the_name_of_its_call(render):
    """A client need not send it, and some templates show it."""
    template = CALLS["all"].replace("<{{ m.role }}>", "<{{ m.role }} {{ m.name }}>")
    talk = [say("user", "Well?"), asks(3)]
    for found in (results(3), results(3, ids=False)):
        text = render(template, [*talk, *found], TOOLS)
        assert text.endswith("<tool weather>result0<tool time>result1<tool weather>result2")
    text = render(template, [*talk, *results(3, (2, 1, 0))], TOOLS)
    assert text.endswith("<tool weather>result2<tool time>result1<tool weather>result0")
    own = [say("tool", "result0", name="own"), say("tool", "result1", tool_call_id="unknown")]
    assert render(template, [*talk, *own], TOOLS).endswith("<tool own>result0<tool >result1")


DEEPSEEK = KNOWS + "{% for m in messages %}{% if m.role == 'assistant' and (m.content or none) is none %}" \
    "{% for c in m.tool_calls %}<call>{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}" \
    "{% elif m.role == 'assistant' %}<answer>{{ m.content.split('</think>')[-1] }}" \
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"  # fmt: skip


def test_text_beside_calls_is_a_turn_of_its_own_where_only_one_is_shown(render):
    text = render(DEEPSEEK, [say("user", "Well?"), asks(2, "I look."), *results(2)], TOOLS)
    in_order(
        text, "<answer>I look.", '<call>weather {"city": "city0"}', '<call>time {"city": "city1"}', "<tool>result0"
    )
    thought = say("assistant", "<think>Hm.</think>Yes.")
    assert render(DEEPSEEK, [say("user", "Well?"), thought]).endswith("<answer>Yes."), "templates may drop thoughts"
    # some versions of transformers keep messages without content from templates, some do not
    text = render(
        DEEPSEEK.replace("(m.content or none)", "m.content"), [say("user", "Well?"), asks(2), *results(2)], TOOLS
    )
    in_order(text, "city0", "city1", "<tool>result0", "result1")


MISTRAL = "{% set turn = namespace(n=0) %}{% for m in messages %}" \
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}" \
    "{% if (m.role == 'user') != (turn.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}" \
    "{% set turn.n = turn.n + 1 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}" \
    "{% if tools and loop.last or tools and messages[loop.index:] | selectattr('role', 'equalto', 'user') | list " \
    "| length == 0 %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}[INST]{{ m.content }}[/INST]" \
    "{% elif m.tool_calls %}[TOOL_CALLS][" \
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{{ c.id }}{{ raise_exception('9') if c.id | length != 9 }}" \
    "{% endfor %}]" \
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id }}" \
    "{% endif %}{% endfor %}"  # fmt: skip


def test_a_template_that_counts_turns_without_calls(render):
    """Mistral's template, which would leave out text next to calls."""
    talk = [say("user", "Well?"), asks(2), *results(2), say("assistant", "Fine."), say("user", "More!")]
    text = render(MISTRAL, talk, TOOLS)
    in_order(
        text, "[INST]Well?", "city0", "city1", "[TOOL_RESULTS]result0", "[TOOL_RESULTS]result1", "Fine.", "[INST]More!"
    )
    assert text.count("[TOOL_CALLS]") == 1 and text.count("[INST]") == 2
    talk[1] = asks(2, "I look.")
    for length in (2, 4, 6):
        in_order(render(MISTRAL, talk[:length], TOOLS), "Well?", "I look.", "city0", "city1",
                 *("result0", "result1")[: length - 2], *("Fine.", "More!")[: length - 4])  # fmt: skip


HARMONY = KNOWS + "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' %}" \
    "{% if 'tool_calls' in m %}{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both') }}{% endif %}" \
    "{% if m.thinking or m.content %}<analysis>{{ m.thinking or m.content }}{% endif %}" \
    "{% set c = m.tool_calls[0].function %}<call>{{ c.name }} {{ c.arguments | tojson }}{% set last.name = c.name %}" \
    "{% else %}<final>{{ m.content }}{% set last.name = none %}{% endif %}" \
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call before a result') }}{% endif %}" \
    "<of {{ last.name }}>{{ m.content | tojson }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}" \
    "{% endfor %}"  # fmt: skip


def test_a_template_of_channels(render):
    asked = asks(2, "I look.") | {"reasoning_content": "Hm."}
    text = render(HARMONY, [say("user", "Well?"), asked, *results(2), say("assistant", "Fine.")], TOOLS)
    in_order(text, "<final>I look.", "<analysis>Hm.", "<call>weather", '<of weather>"result0"', "<call>time",
             '<of time>"result1"', "<final>Fine.")  # fmt: skip


IGNORES = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "talk", "place"),
    [(IGNORES, [say("user", "e"), say("critic", "e")], r"messages\[1\].content, of the role 'critic'"),
     ("<user>{{ messages[-1].content }}", [say("user", "e"), say("assistant", "e"), say("user", "e")],
      r"messages\[0\].content, of the role 'user'"),
     ("Hello.", [say("user", "e")], r"messages\[0\].content, of the role 'user'")],
)  # fmt: skip
def test_what_would_not_be_read_is_refused(render, template, talk, place):
    with pytest.raises(
        TemplateRefusal, match=f"the chat template leaves out {place}, so that the model would not read it"
    ):
        render(template, talk)


def test_tools_that_a_template_shows_to_some_conversations_only(render):
    template = "{% if tools and messages[0].role != 'system' %}{{ tools | tojson }}{% endif %}" \
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls }}\n" \
        "{% endfor %}"  # fmt: skip
    talk = [say("user", "Well?"), asks(2), *results(2)]
    assert "You may call" not in render(template, talk, TOOLS)
    text = render(template, [say("system", "Be kind."), *talk], TOOLS)
    assert text.startswith("<system>Be kind.\n\nYou may call these tools:") and '"name": "time"' in text


def test_a_system_prompt_that_is_left_out_is_not_where_tools_are_told(render):
    text = render(IGNORES, [say("user", "Well?"), asks(2), *results(2)], TOOLS)
    assert text.startswith("<user>You may call these tools:")
    in_order(text, "Well?", "city0", "city1", "result0", "result1")


ELSE = "{% for m in messages %}{% if m.role == 'system' and loop.first %}{{ m.content }} " \
    "{% elif m.role == 'user' %}USER: {{ m.content }} " \
    "{% else %}ASSISTANT: {{ m.content or '' }}SHOWN</s>{% endif %}{% endfor %}"  # fmt: skip
"""Like the templates of Vicuna and Alpaca: every role but the user's is rendered as the assistant."""


@pytest.mark.parametrize("shown", ["", "{{ m.tool_calls | tojson if m.tool_calls }}"])
def test_nobody_else_speaks_as_the_assistant(render, shown):
    template = KNOWS * bool(shown) + ELSE.replace("SHOWN", shown)
    talk = [say("user", "Well?"), asks(2), *results(2), say("assistant", "Fine."), say("user", "More!")]
    text = render(template, talk, TOOLS)
    in_order(text, "Well?", "city0", "city1", "USER: result0", "result1", "ASSISTANT: Fine.", "USER: More!")
    assert text.count("ASSISTANT:") == 2 and bool(shown) == ("call_1" in text)
    for role in ("system", "developer"):
        later = render(template, [*talk[:1], say("assistant", "Fine."), say(role, "Be kind."), say("user", "More!")])
        assert later == "USER: Well? ASSISTANT: Fine.</s>USER: Be kind.\nMore! "
        assert render(template, [say(role, "Be kind."), talk[0]]) == "Be kind. USER: Well? "
    assert "ASSISTANT: Fine." in render(template, [talk[0], say("model", "Fine.")])
