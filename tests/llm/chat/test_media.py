"""Messages with images and sound: their order in the text, and what templates get to see."""

from __future__ import annotations

import copy

import pytest

from pace.assets import TINY
from pace.llm.chat import Tool
from pace.llm.chat.template import ChatTemplate, TemplateRefusal
from pace.llm.processors.prompts import PromptEncoder
from pace.tokenizer.loading import load_tokenizer
from tests.llm.fake_media import AUDIO, IMAGE, PARTS_TEMPLATE, MediaGenerator, Picture, fake_processors, png, runs, wav

TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}{% endfor %}"
LISTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
PART = "{{ p.text or '[" + IMAGE + "]' if p.type in ('text', 'image') }}"
IMAGES = "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}" \
    "{% for p in m.content %}" + PART + "{% endfor %}{% endif %}{% endfor %}"  # fmt: skip
TEMPLATES = {"parts": PARTS_TEMPLATE, "texts": TEXTS, "lists": LISTS, "images": IMAGES}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
LOOK = Tool("look", "", {"type": "object", "properties": {}})


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture
def render(tokenizer):
    def render(template, messages, tools=(), kinds=("image", "audio")):
        mine = copy.deepcopy(tokenizer)
        mine.chat_template = template
        return ChatTemplate(mine, None, PromptEncoder(fake_processors(*kinds), mine)).render_media(messages, tools)

    return render


def image(source="a.png", **fields):
    return {"type": "image", "image": source, **fields}


def text(text):
    return {"type": "text", "text": text}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def in_order(whole, *words):
    at = -1
    for word in words:
        found = whole.find(word, at + 1)
        assert found > at, f"{word!r} does not follow in {whole!r}"
        at = found


@pytest.mark.parametrize("name", TEMPLATES)
def test_media_stand_where_their_parts_stand(render, name):
    sound = {"type": "audio", "audio": b"sound"}
    messages = [user(text("one "), image("1"), text(" two "), text("and "), sound, image("2")),
                {"role": "assistant", "content": "seen"}, user(image("3"), text("three"))]  # fmt: skip
    shown, media = render(TEMPLATES[name], messages)
    in_order(shown, "one [", IMAGE, "] two and [", AUDIO, "][", IMAGE, "]", "seen", f"[{IMAGE}]three")
    assert (shown.count(IMAGE), shown.count(AUDIO)) == (3, 1)
    assert [part.source for part in media] == ["1", b"sound", "2", "3"]
    places = ["[0].content[1]", "[0].content[4]", "[0].content[5]", "[2].content[0]"]
    assert [part.where for part in media] == [f"messages{place}" for place in places]


def test_templates_see_no_source(render):
    shown, _ = render("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p | tojson if p.type == 'text' else (p | string) + '[" + IMAGE + "]' }}{% endfor %}"
        "{% endif %}{% endfor %}", [user(image("secret.png", detail="low"), text("x"))], kinds=("image",))  # fmt: skip
    assert "{'type': 'image'}" in shown and "secret" not in shown and "low" not in shown


@pytest.mark.parametrize(
    ("message", "error", "match"),
    [({"role": "system", "content": [image()]}, ValueError, r"messages\[0\].content\[0\]: only messages of the user"),
     ({"role": "assistant", "content": [text("x"), image()]}, ValueError, r"messages\[0\].content\[1\]: only"),
     (user({"type": "image"}), ValueError, r"content\[0\] is of type image and must have its source as 'image'"),
     (user(image(detail="medium")), ValueError, r"content\[0\].detail must be one of auto, low, high"),
     (user({"type": "video", "video": "x"}), ValueError, r"content\[0\] must be a part of type text, image or audio"),
     (user({"type": ["image"]}), ValueError, r"content\[0\] must be a part of type text, image or audio"),
     ({"role": "user", "content": b"bytes"}, ValueError, r"messages\[0\].content must be text, or a list of parts")],
)  # fmt: skip
def test_media_that_are_refused(render, message, error, match):
    with pytest.raises(error, match=match):
        render(PARTS_TEMPLATE, [message, user(text("What?"))])


def test_a_model_for_text(tokenizer, render):
    with pytest.raises(ValueError, match=r"messages\[0\].content\[1\]: this model takes no images"):
        ChatTemplate(tokenizer).render([user(text("see"), image())])
    with pytest.raises(ValueError, match=r"messages\[0\].content\[0\]: this model takes no sound"):
        render(PARTS_TEMPLATE, [user({"type": "audio", "audio": b"x"})], kinds=("image",))


def test_results_of_tools_with_images(render):
    """They become parts of the turn of the user after the results; a new one if there is none."""
    asked = [user(text("look")), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": [text("seen"), image("r")]}
    knows = "{{ (tools | tojson) if tools }}" + PARTS_TEMPLATE.replace("{% if m.content is string",
        "{{ m.tool_calls | tojson if m.tool_calls }}{% if m.content is string")  # fmt: skip
    shown, media = render(knows, [*asked, result], [LOOK])
    in_order(shown, "<|tool|>seen<|end|>", f"<|user|>[{IMAGE}]<|end|>", "<|assistant|>")
    assert [part.where for part in media] == ["messages[2].content[1]"]
    shown, media = render(knows, [*asked, result, result, user(image("u"), text("And?"))], [LOOK])
    in_order(shown, "seen", "seen", f"<|user|>[{IMAGE}][{IMAGE}][{IMAGE}]And?<|end|>")
    assert [part.source for part in media] == ["r", "r", "u"]
    shown, media = render(knows, [*asked, result, {"role": "assistant", "content": "ok"}, user(text("And?"))], [LOOK])
    in_order(shown, "seen", f"<|user|>[{IMAGE}]<|end|>", "<|assistant|>ok", "And?")


def test_forms_that_join_turns_keep_media(render):
    """Instructions that become the user's, and a description of tools, stand before the media."""
    strict = "{% for m in messages %}{% if m.role not in ('user', 'assistant') or (m.role == 'user') != " \
        "(loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}{% endfor %}" + PARTS_TEMPLATE  # fmt: skip
    system = {"role": "system", "content": "Be brief."}
    shown, media = render(strict, [system, user(text("one "), image("1"), text("two"))], [LOOK])
    in_order(shown, "You may call", "Be brief.\none [", IMAGE, "]two")
    assert [part.source for part in media] == ["1"] and shown.count(IMAGE) == 1
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [text("seen"), image("r")]}
    shown, media = render(
        strict, [user(image("1"), text("look")), call, result, user(text("And?"), image("2"))], [LOOK]
    )
    in_order(shown, f"[{IMAGE}]look", "look", "seen\n", f"[{IMAGE}]And?[{IMAGE}]")
    assert [part.source for part in media] == ["1", "r", "2"]


def test_a_template_that_leaves_an_image_out(render):
    """An image that the model would not see is refused, even if others are shown."""
    once = PARTS_TEMPLATE.replace("p.type == 'image'", "p.type == 'image' and loop.first")
    assert render(once, [user(image(), text("What?"))]).text.count(IMAGE) == 1
    with pytest.raises(TemplateRefusal, match=r"leaves out messages\[0\].content\[0\]"):
        render(once, [user(image(), image(), text("What?"))])


def test_chat_with_media(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(32, 8))
    generator = MediaGenerator()
    messages = [user(image(Picture(16, 8)), image(path), image(png(8, 8)), {"type": "audio", "audio": wav(0.3)},
                     text("What is the capital of France?"))]  # fmt: skip
    output = generator.chat(messages, max_new_tokens=3).output
    tokens, media = generator.seen[-1]
    assert runs(tokens, media) == [("image", 2), ("image", 4), ("image", 1), ("audio", 3)]
    assert output.metrics.num_prompt_tokens == len(tokens)
    again = [*messages, output.message, user(text("And of Italy?"))]
    assert generator.chat(again, max_new_tokens=2).output.finish_reason == "length"
    assert generator.seen[-1][1][0].media.digest == media[0].media.digest
    with pytest.raises(ValueError, match="has 2 placeholders"):
        generator.chat([user(image(png()), text(f"typed {IMAGE}"))])
    with pytest.raises(ValueError, match=r"messages\[0\].content\[1\]: it cannot be decoded"):
        generator.chat([user(text("x"), image(png() + b"broken"))])
    generator.driver.close()
