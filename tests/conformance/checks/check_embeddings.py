"""Vectors for other libraries: LangChain's standard tests by its OpenAI client and in process, LlamaIndex, Haystack."""

from __future__ import annotations

import json
import os
import urllib.request

import pytest
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.dataclasses import Document
from haystack.utils import Secret
from langchain_core.embeddings import Embeddings
from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from openai import BadRequestError

from pace.integrations.langchain import PaceEmbeddings

URL = f"{os.environ['PACE_URL']}/v1"
TEXTS = ["The capital of France is Paris.", "Once upon a time"]
CLIENT = {"base_url": URL, "api_key": "none", "model": "tiny"}


def raw(texts: list[str]) -> list[list[float]]:
    """Vectors by a plain request."""
    body = json.dumps({"input": texts}).encode()
    request = urllib.request.Request(f"{URL}/embeddings", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return [entry["embedding"] for entry in json.load(answer)["data"]]


def check_same(rows: list[list[float]]) -> None:
    assert [pytest.approx(row, abs=1e-6) for row in raw(TEXTS)] == rows


class TestOpenAIEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict:
        return {**CLIENT, "check_embedding_ctx_length": False}


class TestPaceEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return PaceEmbeddings

    @property
    def embedding_model_params(self) -> dict:
        return {"model": os.environ["PACE_MODEL"], "progress": False}


def test_langchain_gets_the_servers_vectors():
    check_same(OpenAIEmbeddings(**CLIENT, check_embedding_ctx_length=False).embed_documents(TEXTS))


def test_langchain_with_ids_of_another_tokenizer_is_refused(monkeypatch):
    """Its default sends ids of OpenAI's tokenizer, which it would download."""

    class Encoding:
        def encode_ordinary(self, text: str) -> list[int]:
            return [100256]

        encode = encode_ordinary

    monkeypatch.setattr("tiktoken.encoding_for_model", lambda name: Encoding())
    with pytest.raises(BadRequestError, match="check_embedding_ctx_length=False"):
        OpenAIEmbeddings(**CLIENT).embed_documents(TEXTS)


def test_llama_index_gets_the_servers_vectors():
    model = OpenAILikeEmbedding(model_name="tiny", api_base=URL, api_key="none")
    check_same(model.get_text_embedding_batch(TEXTS))
    check_same([model.get_text_embedding(TEXTS[0]), model.get_query_embedding(TEXTS[1])])


def test_haystack_gets_the_servers_vectors():
    options = {"api_base_url": URL, "api_key": Secret.from_token("none"), "model": "tiny"}
    documents = OpenAIDocumentEmbedder(**options).run([Document(content=text) for text in TEXTS])["documents"]
    check_same([document.embedding for document in documents])
    check_same([OpenAITextEmbedder(**options).run(text)["embedding"] for text in TEXTS])
