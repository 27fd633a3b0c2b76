"""Images and sound over HTTP: through the clients of OpenAI and Anthropic, counted, and refused."""

from __future__ import annotations

import socket
from typing import Any

import anthropic
import openai
import pytest

from tests.llm.fake_media import AUDIO, IMAGE, png, runs, wav
from tests.server.schemas.test_media import block, data_url, image_url, input_audio, said, text, text_of
from tests.server.serving import QUESTION, Serving, shared_generator
from tests.waiting import wait_until

QUERY = "What is the capital of France?"
PLACE = "messages[0].content[0]"


def media_of(serving: Serving) -> list[tuple[str, int]]:
    """Kind and tokens of each medium of the last request."""
    return runs(*serving.generator.seen[-1])


def num_tokens(serving: Serving) -> int:
    return len(serving.generator.seen[-1][0])


def ask(serving: Serving, *parts: Any, **fields: Any) -> Any:
    return serving.chat(said(list(parts)), max_tokens=2, **fields)


def refusal(reply: Any, status: int = 400) -> dict[str, Any]:
    assert reply.status == status, reply.body
    return reply.error


# -- clients -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(serving):
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)


def test_openais_chat(serving, client):
    parts = [text(QUERY), image_url(data_url(png(24, 16)), detail="auto"), input_audio(wav(0.4)), image_url()]
    answer = client.chat.completions.create(model="tiny", messages=said(parts), max_tokens=4, temperature=0)
    assert media_of(serving) == [("image", 6), ("audio", 4), ("image", 2)]
    assert answer.usage.prompt_tokens == num_tokens(serving)
    history = [*said(parts), answer.choices[0].message, *said([text("And?"), image_url(data_url(png(8, 8)))])]
    stream = client.chat.completions.create(
        model="tiny", messages=history, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert media_of(serving) == [("image", 6), ("audio", 4), ("image", 2), ("image", 1)]
    assert chunks[-1].usage.prompt_tokens == num_tokens(serving)


def test_openais_responses(serving, client):
    content = [{"type": "input_text", "text": QUERY},
               {"type": "input_image", "image_url": data_url(png(160, 160)), "detail": "low"}]  # fmt: skip
    answer = client.responses.create(model="tiny", input=said(content), max_output_tokens=4)
    assert media_of(serving) == [("image", 256)]
    assert answer.usage.input_tokens == num_tokens(serving)
    counted = client.responses.input_tokens.count(model="tiny", input=said(content))
    assert counted.input_tokens == answer.usage.input_tokens


def test_anthropics_client(serving):
    client = anthropic.Anthropic(base_url=serving.url, api_key="none", max_retries=0)
    turns = [
        *said([block(), text("look")]),
        *said([{"type": "tool_use", "id": "t", "name": "look", "input": {}}], "assistant"),
        *said(
            [{"type": "tool_result", "tool_use_id": "t", "content": [text("seen"), block(png(8, 24))]}, text("And?")]
        ),
    ]
    tools = [{"name": "look", "description": "", "input_schema": {"type": "object"}}]
    message = client.messages.create(model="tiny", messages=turns, tools=tools, max_tokens=4)
    assert media_of(serving) == [("image", 2), ("image", 3)]
    assert message.usage.input_tokens == num_tokens(serving)
    counted = client.messages.count_tokens(model="tiny", messages=turns, tools=tools)
    assert counted.input_tokens == message.usage.input_tokens
    tokens, media = serving.generator.seen[-1]
    shown = serving.generator.tokenizer.decode(tokens[: media[1].start])
    assert shown.rindex("<|tool|>seen<|end|>") < shown.rindex("<|user|>["), "it is in the user's turn after the result"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\] is not image/png"):
        client.messages.create(model="tiny", messages=said([block(wav())]), max_tokens=4)


# -- counting ----------------------------------------------------------------------------------------------------------


def test_counting_decodes_nothing(serving):
    parts = [text(QUERY), image_url(data_url(png(32, 16))), input_audio()]
    before = serving.generator.image.num_decoded
    body = {"messages": said(parts)}
    counted = serving.ask("/v1/chat/completions/input_tokens", body).json["input_tokens"]
    tokenized = serving.ask("/tokenize", body).json
    assert tokenized["count"] == counted and tokenized["tokens"].count(0) == 8
    assert serving.ask("/v1/messages/count_tokens", {"messages": said([block(png(32, 16))])}).json["input_tokens"]
    shown = serving.ask("/apply-template", body).json["prompt"]
    assert (shown.count(IMAGE), shown.count(AUDIO)) == (1, 1), "the template's own text has one placeholder for each"
    assert serving.generator.image.num_decoded == before
    assert ask(serving, *parts).json["usage"]["prompt_tokens"] == counted
    too_long = refusal(ask(serving, image_url(data_url(png(400, 400)))))
    assert too_long["code"] == "context_length_exceeded" and serving.generator.image.num_decoded == before + 1


def test_limits_of_tokens():
    from tests.llm.fake_media import MediaGenerator

    with Serving(MediaGenerator(), max_image_tokens=3) as serving:
        ask(serving, image_url(data_url(png(160, 160))))
        assert media_of(serving) == [("image", 3)]
        assert serving.ask("/limits").json["images"] == 16
        assert serving.ask("/props").json["modalities"] == {"vision": True, "audio": True}


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/v1/chat/completions", {"messages": said([text("x"), image_url()])}, "messages[0].content[1]"),
     ("/v1/messages", {"messages": said([block()]), "max_tokens": 5}, None),
     ("/v1/responses", {"input": said([{"type": "input_image", "image_url": data_url()}])}, "input[0].content[0]"),
     ("/tokenize", {"messages": said([input_audio()])}, PLACE),
     ("/v1/messages/count_tokens", {"messages": said([block()])}, None)],
)  # fmt: skip
def test_a_model_without_a_tower(path, body, param):
    with Serving(shared_generator()) as serving:
        error = refusal(serving.ask(path, body))
        assert "the model 'tiny' takes no " in error["message"]
        assert error.get("param") == param
        assert serving.ask("/props").json["modalities"] == {"vision": False, "audio": False}


def test_media_that_the_operator_left_out():
    from tests.llm.fake_media import MediaGenerator

    generator = MediaGenerator()
    with Serving(generator, media=("image",)) as serving:
        assert ask(serving, image_url()).status == 200
        assert "started without" in refusal(ask(serving, input_audio()))["message"]
        assert serving.ask("/props").json["modalities"] == {"vision": True, "audio": False}
        assert "placeholder" in refusal(ask(serving, text(f"typed {AUDIO}")))["message"]
    with Serving(generator, media=()) as serving:
        assert "takes images, but it was started without them" in refusal(ask(serving, image_url()))["message"]
        assert serving.service.max_body_bytes == serving.service.limits.body_bytes
    with pytest.raises(ValueError, match="media=image: this model takes no images"):
        Serving(shared_generator(), media=("image",))


@pytest.mark.parametrize(
    ("parts", "param"),
    [([text(f"typed {IMAGE}"), image_url()], "messages"), ([text(f"typed {IMAGE}")], "messages"),
     ([image_url(data_url(png()[:20]))], PLACE), ([text("x"), image_url(data_url(png() + b"broken"))],
      "messages[0].content[1]"), ([input_audio(wav()[:30])], PLACE), ([input_audio(b"ID3 not a wav", "mp3")], PLACE)],
)  # fmt: skip
def test_media_that_cannot_be_read(serving, parts, param):
    error = refusal(ask(serving, *parts))
    assert error["param"] == param and error["type"] == "invalid_request_error"


def test_placeholders_without_media(serving):
    for prompt in (f"typed {IMAGE}", ["x", AUDIO], [5, 0, 6], [[5], [6, 2]]):
        error = refusal(serving.complete(prompt))
        assert error["param"] == "prompt" and "placeholder" in error["message"]
    assert serving.complete([5, 6, 7], max_tokens=1).status == 200


def test_a_prompt_with_media_is_not_truncated(serving):
    error = refusal(ask(serving, text("x" * 50), image_url(), truncate_prompt_tokens=5))
    assert error["param"] == "truncate_prompt_tokens"


def test_addresses_are_not_contacted(serving):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.3)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"
        for part in (image_url(url), {"type": "input_image", "image_url": url},
                     {"type": "image", "source": {"type": "url", "url": url}}):  # fmt: skip
            assert refusal(ask(serving, part))["code"] == "unsupported_parameter"
        with pytest.raises(TimeoutError):
            listener.accept()


# -- sizes of bodies ---------------------------------------------------------------------------------------------------


def padded(num_bytes: int) -> dict[str, Any]:
    """An image with data beyond its end."""
    return image_url(data_url(png() + bytes(num_bytes)))


def test_large_bodies(serving):
    assert ask(serving, padded(4 << 20)).status == 200
    error = refusal(ask(serving, padded(21 << 20)))
    assert error["param"] == PLACE and "the maximum is 20971520" in error["message"]
    assert "33554432" in refusal(ask(serving, padded(26 << 20)), 413)["message"]
    with Serving(shared_generator()) as other:
        assert "4194304" in refusal(ask(other, padded(4 << 20)), 413)["message"]


def test_large_bodies_of_small_values(serving):
    """A body as large as an image, but full of values that take many times its memory."""
    body = b'{"messages": [' + b"[]," * (1 << 21) + b"[]]}"
    error = refusal(serving.ask("/v1/chat/completions", body), 413)
    assert error["message"] == "the body may have at most 4194304 bytes besides images and sound"
    assert serving.ask("/v1/chat/completions", body[: 4 << 20]).status == 400


def test_large_bodies_together():
    from tests.llm.fake_media import MediaGenerator

    with Serving(MediaGenerator(), body_bytes=10_000, large_body_bytes=100_000) as serving:
        assert ask(serving, padded(50_000)).status == 200
        reply = ask(serving, padded(90_000))
        assert refusal(reply, 429)["type"] == "rate_limit_error" and reply.headers["retry-after"] == "5"
        assert ask(serving, padded(50_000)).status == 200
        wait_until(lambda: not serving.service.shared.large_bodies.num_bytes)  # an answer is sent before that
        assert serving.ask("/metrics").body.count(b'why="memory"') >= 1


def test_text_is_served_as_ever(serving):
    assert serving.chat(QUESTION, max_tokens=30).json["usage"]["prompt_tokens"] > 5
    assert text_of(b"") == ""
