"""A text built turn by turn equals the model's own template rendered for the whole conversation."""

from __future__ import annotations

import copy

import guidance
import pytest
from guidance import assistant, gen, role, system, user
from guidance.chat import ChatTemplate, UnsupportedRoleException

from pace.integrations.guidance import Pace
from pace.integrations.guidance.templates import derive

LOOP = "{% for m in messages %}"
TEMPLATES = {
    "chatml": LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "default system": "{% if messages[0].role != 'system' %}<s>system\nBe kind.</s>{% endif %}"
    + LOOP
    + "<s>{{ m.role }}\n{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    "instructions": "{% set ns = namespace(told='') %}" + LOOP + "{% if m.role == 'system' %}"
    "{% set ns.told = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}{% elif m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + ns.told + m.content + ' [/INST]' }}{% set ns.told = '' %}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}{% else %}{{ raise_exception('role') }}"
    "{% endif %}{% endfor %}",
    "strict": "{{ bos_token }}{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no question') }}{% endif %}" + LOOP + "<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "thinking": LOOP + "<{{ m.role }}>{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "bundled": None,
}
CONVERSATIONS = [
    [("user", "Hello."), ("assistant", "Hi!"), ("user", "How are you?")],
    [("system", "Be brief."), ("user", "Hello."), ("assistant", "Hi!"), ("user", "Bye.")],
    [("system", "Be brief."), ("user", "Hello.")],
]


def tokenizer_with(model, template):
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.chat_template = template or model.tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize("turns", CONVERSATIONS, ids=lambda turns: " ".join(role for role, _ in turns))
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_as_the_template_has_it(model, name, turns):
    lm = Pace(model, echo=False, chat_template=TEMPLATES[name])
    for who, text in turns:
        with role(who):
            lm += text
    with assistant():
        lm += ""
        shown = str(lm)
        ids = lm.engine.tokenizer.encode(shown.encode())
    tokenizer = tokenizer_with(model, TEMPLATES[name])
    messages = [{"role": role, "content": content} for role, content in turns]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if name == "instructions":  # its answers begin with a blank that is not in the generation prompt
        whole += " "
    assert shown == whole.removeprefix(tokenizer.bos_token)
    assert [tokenizer.bos_token_id, *ids] == tokenizer(tokenizer.bos_token + shown, add_special_tokens=False)[
        "input_ids"
    ]
    lm.close()


def test_the_end_of_a_turn_is_there_when_nothing_follows(model):
    ends = {
        name: derive(tokenizer_with(model, source))().get_role_end("assistant") for name, source in TEMPLATES.items()
    }
    assert ends == {
        "chatml": "<|im_end|>\n",
        "default system": "</s>",
        "instructions": " <|end|>",
        "strict": "</assistant>\n",
        "thinking": "<end>",
        "bundled": "<|end|>",
    }


def test_roles_after_text_that_stands_in_no_turn(lm):
    with user():
        text = str(lm + "In short: " + "Hello.")
    assert text.endswith("<|user|>In short: Hello.")
    bare = lm + "A title\n"
    with user():
        bare += "Hello."
    assert str(bare + "") == "A title\n<|user|>Hello.<|end|>"


def test_a_template_of_guidance_is_used_as_it_is(model):
    class Shout(ChatTemplate):
        def get_role_start(self, role_name, **kwargs):
            return f"{role_name.upper()}: "

        def get_role_end(self, role_name=None):
            return "!\n"

    lm = Pace(model, echo=False, chat_template=Shout)
    with user():
        lm += "Hello"
    assert str(lm + "x").startswith("USER: Hello!\n")
    lm.close()


def test_roles_that_a_template_does_not_have(model, lm):
    strict = Pace(model, echo=False, chat_template=TEMPLATES["instructions"])
    with pytest.raises(UnsupportedRoleException, match="judge"), role("judge"):
        strict + "Hello"
    strict.close()
    tokenizer = tokenizer_with(model, None)
    tokenizer.chat_template = None
    assert derive(tokenizer) is None


def test_without_a_template_there_are_no_roles(model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    lm = Pace(model, echo=False)
    with pytest.raises(ValueError, match="no chat template"), user():
        lm + "Hello"
    assert len(str(lm + "1, 2, 3," + gen(max_tokens=4))) > 9
    lm.close()


def test_chat_completion_is_of_the_models_template(lm, model, monkeypatch):
    grammar = '%llguidance {}\nstart: "The capital of Japan is " city\ncity[capture="city"]: /[A-Z][a-z]+/'
    read = []
    tokenize = lm.engine.tokenizer.encode
    monkeypatch.setattr(lm.engine.tokenizer, "encode", lambda text, **options: read.append(text) or tokenize(text))
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    text, captures = lm.engine.chat_completion(messages, grammar)
    rendered = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert read[0].decode() == rendered
    assert text == f"The capital of Japan is {captures['city']}" and captures["city"] == "Tokyo"


def test_system_prompts_and_streams(lm):
    with system():
        lm += "You are a helpful assistant."
    with user():
        lm += "What is the capital of Japan?"

    @guidance.guidance
    def answer(lm):
        with assistant():
            return lm + gen(max_tokens=12, name="city")

    pieces = [str(part) for part in lm.stream() + answer()]
    assert "Tokyo" in pieces[-1] and len(pieces) > 3
    assert all(later.startswith(earlier) for earlier, later in zip(pieces, pieces[1:]))
