"""Chat templates render as in transformers, and cannot leave their sandbox."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

pytest.importorskip("transformers")

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from pace.tokenizer.jinja import render

TEMPLATES = [
    "{% for m in messages %}<{{ m.role }}>\n{{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% continue %}"
    "{% endif %}{{ m.content }}{% endfor %}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}{{ loop.index }}{{ m }}{% endfor %}",
    "{% set ns = namespace(n=0, seen=false) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ messages[-1].content }}",
    "{% for m in messages %}{% generation %}\n  {{ m.content }}\n{% endgeneration %}\n{% endfor %}",
    "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.thinking or '' }}|{{ m.content }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
    "{{ dict(a=1) }}{{ dict.fromkeys(['x']) }}{{ documents or 'none' }}{{ flag }}{% for m in messages %}"
    "{{ m.content | upper }}{% endfor %}",
    "{%- macro show(m) -%}[{{ m.role }}: {{ m.content }}]{%- endmacro -%}{% for m in messages %}{{ show(m) }}"
    "{% endfor %}",
]  # fmt: skip
TEXTS = ["Hi", "  two  \n", "naïve 日本 🙂", "<|im_end|> {{ x }} {% if %}", "quo\"te's", "", "trailing "]


def conversations(count):
    rng = random.Random(0)
    for _ in range(count):
        messages = []
        for role in rng.choices(("system", "user", "assistant", "tool"), k=rng.randint(1, 4)):
            content = rng.choice(TEXTS)
            message = {"role": role, "content": rng.choice([content, [{"type": "text", "text": content}]])}
            message |= rng.choice(
                [{}, {"reasoning": "why"}, {"thinking": "hm"}, {"reasoning_content": "so", "name": None}]
            )
            if role == "assistant" and rng.random() < 0.5:
                message["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": [1, None, 2.5], "é": True}}}]
            messages.append(message)
        yield messages


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(template):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}]
    for messages in conversations(40):
        for options in (
            {},
            {"add_generation_prompt": True},
            {"tools": tools, "flag": np.bool_(False), "bos_token": "<s>"},
        ):
            assert render(template, messages, **options) == expected(template, messages, **options)


def test_a_message_that_goes_on():
    rendered = refused = 0
    for template in TEMPLATES:
        for messages in conversations(30):
            try:
                text = expected(template, messages, continue_final_message=True)
            except ValueError:
                refused += 1
                with pytest.raises(ValueError, match="continue_final_message"):
                    render(template, messages, continue_final_message=True)
            else:
                rendered += 1
                assert render(template, messages, continue_final_message=True) == text
    assert rendered > 50 and refused > 5
    with pytest.raises(ValueError, match="exclude each other"):
        render(
            TEMPLATES[0], [{"role": "user", "content": "a"}], add_generation_prompt=True, continue_final_message=True
        )


def expected(template, messages, **options):
    from transformers.tokenization_utils_base import _normalize_chat_messages

    return render_jinja_template([_normalize_chat_messages(messages)], chat_template=template, **options)[0][0]


def test_objects_are_plain_data():
    @dataclasses.dataclass
    class Message:
        role: str
        content: object

    class Evil:
        def __str__(self):
            return "read"

    messages = [Message("user", [{"text": "a", "image": Evil()}]), {"role": "user", "content": np.float64(2)}]
    assert render("{{ messages }}", messages) == expected("{{ messages }}", messages)
    assert "<Evil>" in render("{{ messages }}", messages)


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}",
     "{{ namespace.__init__.__globals__ }}", "{% set ns = namespace(__class__=1) %}",
     "{% set ns = namespace() %}{% set ns._x = 1 %}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__ }}",
     "{{ dict.__call__.__globals__ }}", "{{ self.__init__.__globals__.__builtins__ }}"],
)  # fmt: skip
def test_the_sandbox_holds(template):
    try:
        assert render(template, [{"role": "user", "content": "a"}]) in ("", "None")
    except (SecurityError, TemplateError) as error:
        assert "globals" not in repr(error) or "unsafe" in str(error) or "undefined" in str(error)


def test_what_a_template_raises():
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "a"}])
    with pytest.raises(TemplateError, match="Expected an expression"):
        render("{% for %}", [{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="one message at least"):
        render(TEMPLATES[0], [])
    with pytest.raises(TypeError, match="must be dicts; got 'x'"):
        render(TEMPLATES[0], ["x"])


def test_a_jinja_whose_sandbox_does_not_hold_is_refused(monkeypatch):
    monkeypatch.setattr("jinja2.__version__", "3.1.5")
    with pytest.raises(ImportError, match=r"need jinja2>=3\.1\.6.*this is 3\.1\.5"):
        render(TEMPLATES[0], [{"role": "user", "content": "a"}])
