"""Vectors match OpenAI's description, as plain answers and through the openai client."""

from __future__ import annotations

import asyncio
import base64

import httpx
import numpy as np
import openai
import pytest
from openai_description import URL, check, post

TEXTS = ["The capital of France is Paris.", "Once upon a time"]
WIDTH = 256
REQUESTS = [
    {"input": TEXTS[0]}, {"input": TEXTS}, {"input": [5, 6, 7]}, {"input": [[5, 6, 7], [8]]},
    {"input": TEXTS, "encoding_format": "float"}, {"input": TEXTS, "dimensions": 8, "user": "me"},
]  # fmt: skip
FAULTS = [
    ({}, 400), ({"input": []}, 400), ({"input": [[]]}, 400), ({"input": "a", "dimensions": 0}, 400),
    ({"input": "a", "encoding_format": "hex"}, 400), ({"input": "a", "model": "none"}, 404),
    ({"input": "word " * 9000}, 400), ({"input": [10**9]}, 400),
]  # fmt: skip


@pytest.fixture(scope="module")
def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("body", REQUESTS, ids=repr)
def test_an_answer(body):
    answer = post("/embeddings", {"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    check(answer.json(), "CreateEmbeddingResponse")


def test_base64():
    """The description has only floats, but OpenAI's client asks for base64."""
    floats, packed = (
        post("/embeddings", {"model": "tiny", "input": TEXTS, "encoding_format": kind}).json()
        for kind in ("float", "base64")
    )
    for entry, other in zip(packed["data"], floats["data"], strict=True):
        found = np.frombuffer(base64.b64decode(entry.pop("embedding")), "<f4")
        assert found.tolist() == np.array(other.pop("embedding"), np.float32).tolist()
    assert packed == floats


@pytest.mark.parametrize("body, status", FAULTS, ids=lambda value: repr(value)[:60])
def test_an_error(body, status):
    answer = post("/embeddings", body)
    assert answer.status_code == status, answer.text
    check(answer.json(), "ErrorResponse")


def test_the_client(client):
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    assert answer.object == "list" and answer.model == "tiny"
    assert [entry.index for entry in answer.data] == [0, 1] and {entry.object for entry in answer.data} == {"embedding"}
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    for entry, other in zip(answer.data, plain.data, strict=True):
        assert len(entry.embedding) == WIDTH
        assert np.float32(entry.embedding).tolist() == np.float32(other.embedding).tolist()
    unit = {"normalize": True}  # which this model does not do by itself
    (short,) = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8, extra_body=unit).data
    assert len(short.embedding) == 8 and abs(np.linalg.norm(short.embedding) - 1) < 1e-6
    ids = httpx.post(f"{URL}/tokenize", json={"content": TEXTS[0], "add_special": True}).json()["tokens"]
    (of_ids,) = client.embeddings.create(model="tiny", input=[ids]).data
    assert of_ids.embedding == answer.data[0].embedding


def test_errors_of_the_client(client):
    for fields, kind, param in (
        ({"input": []}, openai.BadRequestError, "input"),
        ({"input": "a", "dimensions": WIDTH + 1}, openai.BadRequestError, "dimensions"),
        ({"input": "a", "model": "none"}, openai.NotFoundError, "model"),
    ):
        with pytest.raises(kind) as raised:
            client.embeddings.create(**{"model": "tiny", **fields})
        assert raised.value.param == param


async def embed_with_many(texts):
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(client.embeddings.create(model="tiny", input=text) for text in texts))


def test_many_requests_at_once_have_the_vectors_of_one(client):
    texts = [f"text number {number} " * (1 + number % 7) for number in range(24)]
    alone = asyncio.run(embed_with_many(texts))
    together = client.embeddings.create(model="tiny", input=texts)
    assert [answer.data[0].embedding for answer in alone] == [entry.embedding for entry in together.data]
