"""Images and sound in requests: the forms of each API, and what is refused before it is decoded."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

pytest.importorskip("pydantic")

from openai.types.chat import ChatCompletionMessage

from pace.llm.processors.prompts import MediaPart
from pace.server.limits import Limits
from pace.server.schemas.chat import ChatRequest
from pace.server.schemas.messages import MessagesRequest
from pace.server.schemas.responses import ResponsesRequest
from tests.llm.fake_media import png, wav
from tests.server.schemas import requests

PNG, WAV = png(), wav()
JPEG, GIF, WEBP = b"\xff\xd8\xff\xe0 x", b"GIF89a x", b"RIFF\0\0\0\0WEBP"
MP3, MPEG, FLAC = b"ID3\4 x", b"\xff\xfb\x90d", b"fLaC x"
IMAGES = {"image/png": PNG, "image/jpeg": JPEG, "image/gif": GIF, "image/webp": WEBP}


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes = PNG, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{text_of(data)}"


def image_url(url: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url() if url is None else url, **fields}}


def input_audio(data: bytes = WAV, form: Any = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": text_of(data), "format": form}}


def block(data: Any = PNG, media_type: Any = "image/png", **fields: Any) -> dict[str, Any]:
    data = text_of(data) if isinstance(data, bytes) else data
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}, **fields}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def said(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def chat(*parts: Any, role: str = "user", limits: Limits | None = None) -> Any:
    return requests.job_of(ChatRequest, {"messages": said(list(parts), role)}, limits=limits).prompt.messages


def refused(*parts: Any, role: str = "user", limits: Limits | None = None) -> Any:
    return requests.refusal_of(ChatRequest, {"messages": said(list(parts), role)}, limits)


def seen(content: Any) -> list[Any]:
    """Texts, and kind, data, detail and place of media."""
    parts = content if isinstance(content, list) else [text(content)]
    return [
        (part.kind, part.source, part.detail, part.where) if isinstance(part, MediaPart) else part["text"]
        for part in parts
    ]


def test_parts_of_chat_keep_their_order():
    message = chat(text("a "), text("b"), image_url(detail="low"), text("c"), input_audio(), image_url())[0]
    at = "messages[0].content"
    assert seen(message["content"]) == [
        "a ", "b", ("image", PNG, "low", f"{at}[2]"), "c", ("audio", WAV, "auto", f"{at}[4]"),
        ("image", PNG, "auto", f"{at}[5]"),
    ]  # fmt: skip
    assert chat(text("a "), text("b"))[0]["content"] == "a b", "without media it is one text"


@pytest.mark.parametrize("media_type", [*IMAGES, "IMAGE/PNG"])
def test_types_of_images(media_type):
    data = IMAGES[media_type.lower()]
    assert chat(image_url(data_url(data, media_type)))[0]["content"][0].source == data
    for other, wrong in IMAGES.items():
        if other != media_type.lower():
            error = refused(image_url(data_url(wrong, media_type)))
            assert error.message == f"messages[0].content[0] is not {media_type.lower()}, as its first bytes show"


@pytest.mark.parametrize("head", ["image", "image/png;name=cat.png", "image/png;charset=utf-8;x="])
def test_urls_with_parameters_and_without_the_kind_of_image(head):
    """The first one is that of Qwen's examples."""
    assert chat(image_url(data_url(PNG, head)))[0]["content"][0].source == PNG
    assert "is not image/png" in refused(image_url(data_url(WAV, head))).message
    if head == "image":
        assert chat(image_url(data_url(GIF, head)))[0]["content"][0].source == GIF


def test_a_usual_misspelling():
    assert chat(image_url(data_url(JPEG, "image/jpg")))[0]["content"][0].source == JPEG


@pytest.mark.parametrize(
    ("form", "data"), [("wav", WAV), ("mp3", MP3), ("mp3", MPEG), ("flac", FLAC)], ids=["wav", "id3", "mpeg", "flac"]
)
def test_forms_of_sound(form, data):
    assert seen(chat(input_audio(data, form))[0]["content"]) == [("audio", data, "auto", "messages[0].content[0]")]
    for other in (PNG, b"\xff", b"\xff\xd8\xff\xe0"):
        assert "first bytes" in refused(input_audio(other, form)).message


@pytest.mark.parametrize(
    ("given", "detail"), [("auto", "auto"), ("low", "low"), ("high", "high"), ("original", "high"), (None, "auto")]
)
def test_details(given, detail):
    assert chat(image_url(detail=given))[0]["content"][0].detail == detail
    part = {"type": "input_image", "image_url": data_url(), "detail": given, "file_id": None}
    job = requests.job_of(ResponsesRequest, {"input": said([part])})
    assert job.prompt.messages[0]["content"][0].detail == detail


@pytest.mark.parametrize(
    "part",
    [
        image_url("https://example.org/a.png"), image_url("HTTP://example.org/a.png"), image_url("file:///etc/passwd"),
        image_url("ftp://example.org/a.png"), {"type": "image_url", "image_url": "http://127.0.0.1/"},
        {"type": "input_image", "file_id": "file-1"}, {"type": "input_image", "file_id": "f", "image_url": data_url()},
        {"type": "file", "file": {"file_id": "file-1"}}, {"type": "file", "file": {"file_data": data_url()}},
        {"type": "input_file", "file_id": "f"}, {"type": "document", "source": {}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, {"type": "video", "video": "x"},
        {"type": "input_video"}, {"type": "image_embeds", "image_embeds": "AAAA"}, {"type": "audio_embeds"},
        {"type": "audio_url", "audio_url": {"url": "http://x"}}, block() | {"source": {"type": "url", "url": "https://x"}},
        block() | {"source": {"type": "file", "file_id": "f"}}, block(transformations={"resize": {}}),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(part):
    error = refused(text("see"), part)
    assert (error.param, error.code) == ("messages[0].content[1]", "unsupported_parameter")
    assert error.message.startswith("messages[0].content[1]: ")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"}, {"type": "image_url", "image_url": {}}, {"type": "image_url", "image_url": 5},
        {"type": "input_image"}, image_url("a.png"), image_url("/tmp/a.png"), image_url(text_of(PNG)), image_url(""),
        image_url("data:image/png,raw"), image_url("data:;base64,AAAA"), image_url("data:image/png;base64AAAA"),
        image_url("data:image/png;charset=utf-8;base64,AAAA"), image_url(data_url(media_type="image/bmp")),
        image_url(data_url(media_type="image/svg+xml")), image_url(data_url(media_type="text/html")),
        image_url(data_url(WAV, "audio/wav")), image_url("data:image/png;base64,"), image_url(detail="medium"),
        image_url(detail=5), image_url(detail=["low"]), input_audio(form="ogg"), input_audio(form=None),
        input_audio(form=["wav"]), {"type": "input_audio"}, {"type": "input_audio", "input_audio": {"format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": 5, "format": "wav"}}, {"type": "image"}, block(5),
        block(media_type="image/bmp"), block(media_type=["image/png"]), {"type": "image", "source": {"type": "text"}},
        {"type": ["image_url"]}, {"type": "image_uri"}, {"text": "no type"}, [], "text", None, 5,
    ],
)  # fmt: skip
def test_parts_that_are_malformed(part):
    error = refused(text("see"), part)
    assert error.param == "messages[0].content[1]" and error.message.startswith("messages[0].content[1] ")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1], lambda text: text + "=", lambda text: text + "====", lambda text: text + "AAA",
        lambda text: " " + text, lambda text: text[:8] + "\n" + text[8:], lambda text: text + "\n",
        lambda text: text[:8] + "-_-_" + text[12:], lambda text: text[:8] + "é" + text[9:],
        lambda text: text[:8] + "====" + text[8:], lambda text: "====", lambda text: text[:4] + "%2B" + text[7:],
    ],
)  # fmt: skip
def test_base64_is_strict(change):
    wrong = change(text_of(PNG))
    for part in (image_url(f"data:image/png;base64,{wrong}"), block(wrong)):
        error = refused(part)
        assert error.param == "messages[0].content[0]"
        assert "base64" in error.message


def test_errors_show_no_data():
    secret = text_of(b"\x89PNG\r\n\x1a\n" + b"secret" * 50)
    parts = [
        image_url(f"data:image/bmp;base64,{secret}"), image_url(secret), image_url(f"http://{secret}"),
        image_url(f"data:image/png;base64,{secret}!"), {"type": secret, "image_url": 1}, block(media_type=secret),
        {"type": "image_url", "image_url": {"url": [secret]}}, input_audio(form=secret), image_url(detail=secret),
        {"type": "image_url", "image_url": [secret]}, {"image_url": {"url": secret}}, [secret],
    ]  # fmt: skip
    for part in parts:
        message = refused(part).message
        assert len(message) < 300 and secret[30:60] not in message[100:], part
    for body in ({"messages": secret}, {"messages": [secret]}, {"messages": [{"role": secret}]},
                 {"messages": [{"content": [image_url(secret)]}]}, {"messages": said({"url": secret})}):  # fmt: skip
        assert len(requests.refusal_of(ChatRequest, body).message) < 300
    body = {"messages": said([block(secret)]), "max_tokens": secret}
    assert len(requests.refusal_of(MessagesRequest, body).message) < 300


def test_lengths_are_checked_before_decoding(monkeypatch):
    limits = Limits(media_bytes=len(PNG))
    assert chat(image_url(), limits=limits)
    monkeypatch.setattr(base64, "b64decode", None)
    error = refused(image_url(data_url(PNG + b"x")), limits=limits)
    assert error.message == f"messages[0].content[0] has {len(PNG) + 1} bytes; the maximum is {len(PNG)}"
    assert str(len(WAV)) in refused(input_audio(), limits=limits).message


def test_numbers_of_media():
    limits = Limits(images=2, clips=1)
    parts = [image_url(), input_audio(), image_url()]
    assert chat(*parts, limits=limits)
    body = {"messages": said(parts) + said([text("and"), image_url()])}
    assert requests.refusal_of(ChatRequest, body, limits).param == "messages[1].content[1]"
    assert refused(*parts, input_audio(), limits=limits).param == "messages[0].content[3]"
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block(), block()]}
    body = {"messages": said([result, block()]), "max_tokens": 5}
    error = requests.refusal_of(MessagesRequest, body, limits)
    assert error.param == "messages[0].content[1]" and "more than 2 images" in error.message


@pytest.mark.parametrize("role", ["system", "developer", "assistant", "function"])
def test_media_of_other_roles(role):
    for part in (image_url(), input_audio()):
        error = refused(text("x"), part, role=role)
        assert error.param == "messages[0].content[1]" and "only messages of the user" in error.message


def test_media_of_other_roles_in_other_apis():
    for place, body in (
        ("system[0]", {"system": [block()], "messages": said("x")}),
        ("messages[0].content[0]", {"messages": said([block()], "assistant") + said("x")}),
        ("messages[0].content[0]", {"messages": said([block()], "system") + said("x")}),
    ):
        error = requests.refusal_of(MessagesRequest, body | {"max_tokens": 5})
        assert error.param == place and "only messages of the user" in error.message
    for role in ("assistant", "system", "developer"):
        body = {"input": said([{"type": "input_image", "image_url": data_url()}], role)}
        assert requests.refusal_of(ResponsesRequest, body).param == "input[0].content[0]"


def test_fields_that_are_refused():
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        body = {"messages": said("x"), name: {"max_pixels": 1 << 40}}
        assert requests.refusal_of(ChatRequest, body).code == "unsupported_parameter"
    body = {"messages": said("x"), "max_tokens": 5, "mm_processor_kwargs": {"a": 1}}
    assert requests.refusal_of(MessagesRequest, body).param == "mm_processor_kwargs"
    assert requests.refusal_of(ResponsesRequest, {"input": "x", "mm_processor_kwargs": {"a": 1}}).param
    messages = [*said("x"), {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}, *said("y")]
    assert requests.refusal_of(ChatRequest, {"messages": messages}).param == "messages[1].audio"
    for fields in ({"modalities": ["text", "audio"]}, {"audio": {"voice": "a", "format": "wav"}}):
        assert requests.refusal_of(ChatRequest, {"messages": said("x"), **fields}).code == "unsupported_parameter"


# -- responses and messages --------------------------------------------------------------------------------------------


def test_responses():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": data_url(), "detail": "low"},
             input_audio()]  # fmt: skip
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_text", "text": "seen"}, parts[1]],
    }
    messages = requests.job_of(ResponsesRequest, {"input": [*said(parts), call, output]}).prompt.messages
    assert seen(messages[0]["content"]) == ["a", ("image", PNG, "low", "input[0].content[1]"),
                                            ("audio", WAV, "auto", "input[0].content[2]")]  # fmt: skip
    assert messages[2]["role"] == "tool"
    assert seen(messages[2]["content"]) == ["seen", ("image", PNG, "low", "input[2].output[1]")]


def messages_of(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return requests.job_of(MessagesRequest, {"messages": turns, "max_tokens": 5}).prompt.messages


def test_messages():
    found = messages_of(said([text("a"), block(cache_control={"type": "ephemeral"}), text("b"), block()]))
    at = "messages[0].content"
    expected = ["a", ("image", PNG, "auto", f"{at}[1]"), "b", ("image", PNG, "auto", f"{at}[3]")]
    assert seen(found[0]["content"]) == expected
    found = messages_of(said([text("a"), block()]) + said("b") + said([block()]) + said([text("c")]))
    assert [part if isinstance(part, str) else part[3] for part in seen(found[0]["content"])] == [
        "a", f"{at}[1]", "b", "messages[2].content[0]", "c"]  # fmt: skip
    found = messages_of(said("a") + said([text("b"), block()]))
    assert seen(found[0]["content"])[:3] == ["a", "\n", "b"], "two texts are two lines, as ever"


def test_results_of_tools_with_images():
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("seen"), block()]}
    found = messages_of(said("look") + said([call], "assistant") + said([result, text("And?"), block()]))
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "user"]
    at = "messages[2].content"
    assert seen(found[2]["content"]) == ["seen", ("image", PNG, "auto", f"{at}[0].content[1]")]
    assert seen(found[3]["content"]) == ["And?", ("image", PNG, "auto", f"{at}[2]")]
    found = messages_of(said("look") + said([call], "assistant") + said([result | {"is_error": True}]))
    assert "".join(part for part in seen(found[2]["content"]) if isinstance(part, str)) == "Error: seen"
    only = result | {"content": [block()]}
    assert len(messages_of(said("look") + said([call], "assistant") + said([only]))[2]["content"]) == 1


def test_a_conversation_of_openais_client():
    """An answer that the client dumps whole has `audio`, `refusal` and others, all None."""
    answer = ChatCompletionMessage(role="assistant", content="A cat.", refusal=None, audio=None, tool_calls=None)
    history = [*said([text("What?"), image_url()]), answer.model_dump(), *said([text("And?"), image_url()])]
    messages = requests.job_of(ChatRequest, json.loads(json.dumps({"messages": history}))).prompt.messages
    assert [len(message["content"]) for message in messages] == [2, len("A cat."), 2]
