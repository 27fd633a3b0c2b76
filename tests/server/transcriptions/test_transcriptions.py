"""`POST /v1/audio/transcriptions`: through OpenAI's client, streamed, refused, and left."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("transformers")

from pace.llm import LLMModel
from tests.llm.fake_media import MediaGenerator
from tests.llm.processors.transcribing import SOUND, save_transcribing
from tests.media.drawn import clips
from tests.server.serving import Serving, request_bytes, shared_generator

PATH = "/v1/audio/transcriptions"


class Transcribing(Serving):
    """A server whose plain request is that for a transcript."""

    text = ""

    def check_well(self) -> None:
        assert send(self).json["text"] == self.text


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[LLMModel]:
    path = tmp_path_factory.mktemp("transcribing")
    save_transcribing(path)
    with LLMModel(path, dtype="float32", progress=False, kv_cache_bytes="16MiB") as model:
        yield model


@pytest.fixture(scope="module")
def serving(model) -> Iterator[Serving]:
    with Transcribing(model.generator, media_bytes=1 << 20) as running:
        running.text = model.transcribe(SOUND).text
        yield running


@pytest.fixture
def client(serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)


def form(fields: dict[str, Any], file: bytes | None = SOUND) -> tuple[bytes, str]:
    """The body of a form as httpx writes it, and its content type."""
    files = {} if file is None else {"file": ("a.wav", file, "audio/wav")}
    fields = {name: (None, value) for name, value in fields.items()}
    request = httpx.Request("POST", "http://x", files=fields | files)
    return request.read(), request.headers["content-type"]


def send(serving: Serving, sound: bytes | None = SOUND, path: str = PATH, headers: Any = None, **fields: Any) -> Any:
    body, kind = form({"model": "tiny"} | fields, sound)
    return serving.ask(path, body, **{"Content_Type": kind} | (headers or {}))


def test_openais_client(client, model):
    whole = model.transcribe(SOUND)
    answer = client.audio.transcriptions.create(model="tiny", file=("a.wav", SOUND))
    num_prompt, num_said = whole.metrics.num_prompt_tokens, whole.metrics.num_generated_tokens
    assert answer.text == whole.text and answer.usage.type == "tokens"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (num_prompt, num_said)
    assert answer.usage.total_tokens == num_prompt + num_said
    details = answer.usage.input_token_details
    assert (details.audio_tokens, details.text_tokens) == (17, num_prompt - 17)
    text = client.audio.transcriptions.create(model="tiny", file=("a.wav", SOUND), response_format="text")
    assert text == whole.text + "\n"
    asked = {"language": "de", "prompt": "w3 w4", "temperature": 0.0, "response_format": "json"}
    told = client.audio.transcriptions.create(model="tiny", file=("a.wav", SOUND), **asked)
    assert told.text == model.transcribe(SOUND, "German", "w3 w4").text


@clips
def test_clips_as_users_send_them(client, model, clip):
    """Its rate may be any, and the header of a clip that espeak-ng speaks does not know its size."""
    words = model.transcribe(clip()).text
    num_encoded = model.generator.engine.media.num_encoded
    assert words and client.audio.transcriptions.create(model="tiny", file=("a.wav", clip())).text == words
    assert model.generator.engine.media.num_encoded == num_encoded, "the rows are those of Python's clip"


@pytest.mark.parametrize("asked", [{}, {"language": "en"}, {"response_format": "text"}])
def test_a_stream(client, model, asked):
    events = list(client.audio.transcriptions.create(model="tiny", file=("a.wav", SOUND), stream=True, **asked))
    whole = client.audio.transcriptions.create(
        model="tiny", file=("a.wav", SOUND), **{**asked, "response_format": "json"}
    )
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert events[-1].type == "transcript.text.done" and events[-1].text == whole.text
    assert "".join(event.delta for event in events[:-1]) == whole.text and len(events) > 1
    assert events[-1].usage.model_dump() == whole.usage.model_dump()


def test_sampling(serving, model):
    """A temperature samples, so answers differ; without one they are greedy."""
    texts = {send(serving, temperature="1.5").json["text"] for _ in range(4)}
    assert len(texts) > 1
    assert {send(serving).json["text"] for _ in range(2)} == {model.transcribe(SOUND).text}


REFUSED = [
    ({"response_format": "srt"}, "response_format", "srt needs times"),
    ({"response_format": "vtt"}, "response_format", "vtt needs times"),
    ({"response_format": "verbose_json"}, "response_format", "verbose_json needs times"),
    ({"response_format": "xml"}, "response_format", "must be json or text, got 'xml'"),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "no times"),
    ({"timestamp_granularities": "word"}, "timestamp_granularities", "no times"),
    ({"include[]": "logprobs"}, "include", "not supported"),
    ({"chunking_strategy": "auto"}, "chunking_strategy", "one block"),
    ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", "one block"),
    ({"known_speaker_names[]": "Ada"}, "known_speaker_names", "speakers"),
    ({"language": "xx"}, "language", "must be one of ar (Arabic)"),
    ({"language[]": "en"}, "language", "string"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": "nan"}, "temperature", "finite"),
    ({"temperature": "-1"}, "temperature", "temperature"),
    ({"stream": "maybe"}, "stream", "boolean"),
    ({"prompt": "<|audio_pad|>"}, "prompt", "2 placeholders"),
    ({"prompt": "w1 " * 600}, "prompt", "too long"),
    ({"prompt[]": "a", "prompt": "b"}, "prompt", "twice"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_fields_that_are_refused(serving, fields, param, message):
    for stream in ({}, {"stream": "true"}):
        reply = send(serving, **(stream | fields))
        assert reply.status == 400, reply.body
        assert reply.error["param"] == param and message in reply.error["message"]


def test_files_that_are_refused(serving, model):
    for file, message in (
        (None, "file: is missing"), (b"", "is not a WAV"), (b"no sound", "is not a WAV"), (SOUND[:60], "file: "),
        (SOUND + bytes(1 << 20), "the maximum is 1048576"),
    ):  # fmt: skip
        reply = send(serving, file)
        assert (reply.status, reply.error["param"]) == (400, "file") and message in reply.error["message"], reply.body
    reply = send(serving, None, file="text")
    assert reply.status == 400 and reply.error["param"] == "file" and "must be a file" in reply.error["message"]
    assert send(serving, model="other").status == 404
    assert send(serving).json["text"] == model.transcribe(SOUND).text


def test_bodies(serving):
    body, kind = form({"model": "tiny"})
    for wrong in ("application/json", "application/x-www-form-urlencoded", "text/plain"):
        assert serving.ask(PATH, body, Content_Type=wrong).status == 415
    assert serving.ask("/v1/chat/completions", body, Content_Type=kind).status == 415
    for broken in (body[:-20], body[2:], b"", b"{}", body.replace(b"form-data", b"other")):
        assert serving.ask(PATH, broken, Content_Type=kind).status == 400
    packed = serving.ask(PATH, gzip.compress(body), Content_Type=kind, Content_Encoding="gzip")
    assert packed.status == 200 and packed.json == serving.ask(PATH, body, Content_Type=kind).json
    assert send(serving, wat="1").headers["x-pace-ignored"] == "wat"
    assert serving.ask(PATH).status == 405
    assert serving.ask(PATH, bytes(40 << 20), Content_Type=kind).status == 413


def test_pages_of_other_origins(serving):
    """A browser sends a form to any server without asking first, so its origin is checked."""
    own = f"http://127.0.0.1:{serving.port}"
    for origin in ("http://evil.example", "null", f"http://evil.example/{own}"):
        assert send(serving, headers={"Origin": origin}).status == 403
    host = f"127.0.0.1:{serving.port}"
    assert send(serving, headers={"Origin": own, "Host": host}).status == 200
    with Serving(serving.generator, cors_origins=("http://good.example",)) as open_to_one:
        assert send(open_to_one, headers={"Origin": "http://good.example"}).status == 200
        assert send(open_to_one, headers={"Origin": "http://evil.example"}).status == 403


def test_models_that_do_not_transcribe():
    with Serving(shared_generator()) as serving:
        reply = send(serving)
        assert reply.status == 400 and reply.error["message"] == "the model 'tiny' takes no sound"
        assert reply.error["param"] == "model"
    generator = MediaGenerator("audio")
    with Serving(generator) as serving:
        reply = send(serving)
        assert (
            reply.status == 400
            and "the model 'tiny' takes sound, but is not a model for transcriptions" in reply.error["message"]
        )
    with Serving(generator, media=()) as serving:
        assert "was started without them" in send(serving).error["message"]
    generator.driver.close()


def test_it_is_counted_and_described(serving):
    assert send(serving, path="/audio/transcriptions", model="alias").status == 200
    assert send(serving, response_format="srt").status == 400
    metrics = serving.ask("/metrics").body
    assert f'http_requests_total{{route="{PATH}",status="200"}}'.encode() in metrics
    assert f'http_requests_total{{route="{PATH}",status="400"}}'.encode() in metrics
    operation = serving.ask("/openapi.json").json["paths"][PATH]["post"]
    schema = operation["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert schema["properties"]["file"] == {"format": "binary", "title": "File", "type": "string"}
    assert "file" in schema["required"] and "text/plain" in operation["responses"]["200"]["content"]


def test_clients_that_leave(serving, model):
    """The engine is free at once, whether the client leaves before the first word or after it."""
    forward, steps = model.generator.engine.model.forward, []

    def slowed(batch: Any) -> Any:
        steps.append(batch)
        time.sleep(0.02)
        return forward(batch)

    body, kind = form({"language": "de", "stream": "true"})
    model.generator.engine.model.forward = slowed
    try:
        for waits in (False, True):
            with serving.connect() as connection:
                connection.sendall(request_bytes(PATH, body, Content_Type=kind))
                seen = b""
                while waits and b"transcript.text.delta" not in seen:
                    seen += connection.recv(65536)
            num_steps = len(steps)
            serving.check_idle()
            assert len(steps) - num_steps < 50, f"{len(steps) - num_steps} steps after the client had left"
    finally:
        del model.generator.engine.model.forward
    assert json.loads(send(serving).body)["text"] == model.transcribe(SOUND).text
