"""Answers about drawn pictures and a clip, through the clients of OpenAI and Anthropic: those of Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from pace.llm import LLMModel
from tests.llm.processors.chatting import ANSWER, QUESTION, question, save_omni_chatting
from tests.media.drawn import clips, media_type, pictures
from tests.server.schemas.test_media import block, data_url, image_url, input_audio, said, text
from tests.server.serving import Serving

GREEDY = {"model": "tiny", "temperature": 0}


class Seeing(Serving):
    """A server whose plain request is a question about the pictures."""

    text = ""

    def check_well(self) -> None:
        reply = self.chat(said([*shown_in_chat(), text(QUESTION)]), max_tokens=12)
        assert reply.json["choices"][0]["message"]["content"] == self.text


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[LLMModel]:
    path = tmp_path_factory.mktemp("seeing")
    save_omni_chatting(path)
    with LLMModel(path, dtype="float32", progress=False, kv_cache_bytes="16MiB") as model:
        yield model


@pytest.fixture(scope="module")
def serving(model) -> Iterator[Serving]:
    with Seeing(model.generator) as running:
        running.text = model.chat(question(), **ANSWER).text
        yield running
        running.check_well()


@pytest.fixture
def expected(model):
    """`expected(clip=None)`: the answer of Python. Afterwards, no medium may have been encoded again: the rows that
    the model saw are those of Python's media."""
    texts, engine = [], model.generator.engine

    def ask(clip: bytes | None = None) -> str:
        texts.append((model.chat(question(clip), **ANSWER).text, engine.media.num_encoded))
        return texts[-1][0]

    yield ask
    assert texts and engine.media.num_encoded == texts[-1][1]


def shown_in_chat() -> list[dict[str, Any]]:
    return [image_url(data_url(data, media_type(name))) for name, data in pictures().items()]


@clips
def test_openais_chat(serving, expected, clip):
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)
    answer = expected(clip())
    asked = GREEDY | {"messages": said([*shown_in_chat(), input_audio(clip()), text(QUESTION)]), "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == answer
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == answer
    assert pieces[-1].usage == whole.usage


@clips
def test_openais_responses(serving, expected, clip):
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)
    answer = expected(clip())
    shown = [
        {"type": "input_image", "image_url": data_url(data, media_type(name)), "detail": "auto"}
        for name, data in pictures().items()
    ]
    content = [*shown, input_audio(clip()), {"type": "input_text", "text": QUESTION}]
    asked = GREEDY | {"input": said(content), "max_output_tokens": 12}
    assert client.responses.create(**asked).output_text == answer
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer


def test_anthropics_client(serving, expected):
    """Its API has no sound."""
    client = anthropic.Anthropic(base_url=serving.url, api_key="none", max_retries=0)
    answer = expected()
    content = [*(block(data, media_type(name)) for name, data in pictures().items()), text(QUESTION)]
    asked = {"model": "tiny", "messages": said(content), "max_tokens": 12, "extra_body": {"temperature": 0}}
    message = client.messages.create(**asked)
    assert message.content[0].text == answer
    counted = client.messages.count_tokens(model="tiny", messages=said(content)).input_tokens
    assert counted == message.usage.input_tokens + message.usage.cache_read_input_tokens
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == answer
