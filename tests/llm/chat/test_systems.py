"""Instructions of the roles system and developer, with templates that expect them in another role or place."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("transformers")

from pace.llm.chat.template import TemplateRefusal
from tests.llm.chat.test_manners import (
    CONTENTS,
    GEMMA,
    IGNORES,
    KNOWS,
    TOOLS,
    asks,
    in_order,
    render,  # noqa: F401
    results,
    say,
    tokenizer,  # noqa: F401
)

LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_ONLY = (
    "{{ raise_exception('system first') if messages[1:] | selectattr('role', 'equalto', 'system') | list }}" + LOOP
)
"""Like Qwen3.5 and Ministral."""
LATER_IGNORED = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
"""Like Granite 3, Bielik and MiniMax."""
LAST_TAKEN = "{% set s = namespace(x='') %}{% for m in messages if m.role == 'system' %}{% set s.x = m.content %}" \
    "{% endfor %}" \
    "{{ s.x }}{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # fmt: skip
"""Like the distillations of DeepSeek-R1."""
OWN = (
    "<system>You are a reasoner.{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
"""Like Phi-4-reasoning, which has its own instructions."""
SYSTEM, USER, ANSWER, MORE = (
    say("system", "Be kind."),
    say("user", "Well?"),
    say("assistant", "Fine."),
    say("user", "And?"),
)


@pytest.mark.parametrize("template", [GEMMA, IGNORES, OWN])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_that_are_not_taken_begin_the_users_turn(render, template, role):  # noqa: F811
    text = render(template, [say(role, "Be kind."), USER, ANSWER, MORE])
    in_order(text, "<user>Be kind.\nWell?", "Fine.", "<user>And?")
    assert text.count("<user>") == 2 and "<system>Be" not in text
    assert render(template, [say(role, ""), USER]).strip().endswith("<user>Well?")
    in_order(render(template, [SYSTEM, say(role, "Be brief."), USER]), "<user>Be kind.", "Be brief.", "Well?")
    in_order(render(template, [USER, ANSWER, say(role, "Be kind."), MORE]), "Well?", "Fine.", "<user>Be kind.\nAnd?")
    if template != GEMMA:  # GEMMA renders any role in the place of an answer
        in_order(render(template, [USER, say(role, "Be kind.")]), "<user>Well?\nBe kind.")
    goes_on = render(template, [say(role, "Be kind."), USER, ANSWER], begin_answer=False, continue_answer=True)
    in_order(goes_on, "<user>Be kind.\nWell?", "Fine.")
    assert goes_on.endswith("Fine.")


@pytest.mark.parametrize("template", [GEMMA, IGNORES, OWN])
def test_instructions_tools_and_results_in_one_turn(render, template):  # noqa: F811
    talk = [SYSTEM, USER, asks(2), *results(2), MORE]
    text = render(template, talk, TOOLS)
    in_order(text, "You may call these tools", "Be kind.", "Well?", "city0", "city1", "result0", "result1", "And?")
    assert text.count("<user>") == 2


@pytest.mark.parametrize("template", [FIRST_ONLY, LATER_IGNORED])
def test_instructions_that_are_taken_at_the_beginning_only(render, template):  # noqa: F811
    text = render(template, [SYSTEM, say("system", "Be brief."), USER])
    assert text == "<system>Be kind.\n\nBe brief.<user>Well?"
    text = render(template, [SYSTEM, USER, ANSWER, say("system", "Be brief."), MORE])
    assert text == "<system>Be kind.<user>Well?<assistant>Fine.<user>Be brief.\nAnd?"
    text = render(template, [USER, ANSWER, say("system", "Be brief."), MORE])
    assert text == "<user>Well?<assistant>Fine.<user>Be brief.\nAnd?"


def test_of_which_the_last_is_taken(render):  # noqa: F811
    assert render(LAST_TAKEN, [SYSTEM, say("system", "Be brief."), USER]) == "Be kind.\n\nBe brief.<user>Well?"


def test_instructions_that_are_taken_stay_as_they_are(render):  # noqa: F811
    talk = [SYSTEM, say("system", "Be brief."), USER, ANSWER, say("developer", "Be brief, too."), MORE]
    text = "<system>Be kind.<system>Be brief.<user>Well?<assistant>Fine.<developer>Be brief, too.<user>And?"
    assert render(LOOP, talk) == text


@pytest.mark.parametrize("content", CONTENTS)
def test_a_developer_is_a_system_where_only_that_is_known(render, content):  # noqa: F811
    roles = "{{ raise_exception('no such role') if m.role not in ('system', 'user', 'assistant') }}"
    ignored = "{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>" + CONTENTS[content] + "{% endif %}"
    for body in (roles + ignored, ignored):
        text = render("{% for m in messages %}" + body + "{% endfor %}", [say("developer", "Be kind."), USER, ANSWER])
        assert text == "<system>Be kind.<user>Well?<assistant>Fine."


def test_it_is_logged_once(render, caplog):  # noqa: F811
    with caplog.at_level(logging.WARNING, "pace"):
        for _ in range(3):
            render(GEMMA + "{# logged #}", [SYSTEM, USER])
            render(LOOP + "{# logged #}", [SYSTEM, USER])
    (record,) = caplog.records
    assert "chat_template.jinja: the chat template does not support all system messages" in record.message


@pytest.mark.parametrize(
    ("template", "talk", "reason"),
    [(GEMMA, [SYSTEM, USER, say("user", "Two?")], "roles must alternate"),
     (IGNORES, [SYSTEM, USER, say("critic", "e")], r"leaves out messages\[2\].content, of the role 'critic'"),
     ("<user>{{ messages[-1].content }}", [SYSTEM, USER, ANSWER, MORE], r"leaves out messages\[0\].content")],
)  # fmt: skip
def test_what_is_still_refused_is_told(render, template, talk, reason):  # noqa: F811
    with pytest.raises(TemplateRefusal, match=reason):
        render(template, talk)


def test_templates_that_iterate_over_tools_that_are_not_given(render):  # noqa: F811
    """Like the tool template of Hermes 2 Pro, and that of Command R+."""
    template = "Tools:{% for tool in tools %}{{ tool.function.name }};{% endfor %}" + LOOP
    assert render(template, [USER]) == "Tools:<user>Well?"
    assert render(template, [USER], TOOLS) == "Tools:weather;time;<user>Well?"
    assert render(KNOWS + "{{ 'none' if tools is none or tools is not defined }}" + LOOP, [USER]) == "none<user>Well?"
