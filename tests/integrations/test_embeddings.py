"""Vectors under the names of other libraries: LangChain's `Embeddings`, sentence-transformers' `encode`."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from pace.integrations.sentence_transformers import SentenceEncoder, document_prompt, query_prompt
from pace.llm.embedding_model import EmbeddingModel

PROMPTS = {"query": "Q: ", "passage": "P: "}
TEXTS = ["Once upon a time", "The capital of France"]


class Recorded(EmbeddingModel):
    """A model without weights, whose vectors show what it was asked."""

    prompts = PROMPTS
    default_prompt_name = None
    dimensions = 4
    max_length = 16
    tokenizer = None

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def embed(self, texts, prompt=None, dimensions=None, normalise=None, truncate=True):
        self.calls.append((texts, prompt, dimensions, normalise, truncate))
        return torch.tensor([[len(text), 1.0, 2.0, 3.0] for text in texts])[:, :dimensions]


@pytest.fixture
def model() -> Recorded:
    return Recorded()


def test_langchain(model):
    pytest.importorskip("langchain_core")
    from pace.integrations.langchain import PaceEmbeddings

    vectors = PaceEmbeddings(model, dimensions=2)
    assert vectors.embed_documents(TEXTS) == [[16.0, 1.0], [21.0, 1.0]] and vectors.embed_query("a") == [1.0, 1.0]
    assert asyncio.run(vectors.aembed_query("a")) == [1.0, 1.0] and vectors.embed_documents([]) == []
    assert [call[1:] for call in model.calls[:2]] == [("passage", 2, None, True), ("query", 2, None, True)]
    with pytest.raises(TypeError, match="dtype"):
        PaceEmbeddings(model, dtype="float32")


def test_forms_of_sentence_vectors(model):
    encoder = SentenceEncoder(model)
    array = encoder.encode(TEXTS, batch_size=1, show_progress_bar=False)
    assert isinstance(array, np.ndarray) and array.shape == (2, 4) and array.dtype == np.float32
    assert encoder.encode("a").shape == (4,) and encoder.encode([]).shape == (0, 4)
    assert torch.is_tensor(encoder.encode(TEXTS, convert_to_tensor=True))
    assert [tuple(row.shape) for row in encoder.encode(TEXTS, convert_to_numpy=False)] == [(4,), (4,)]
    assert encoder.encode(TEXTS, truncate_dim=3, normalize_embeddings=True).shape == (2, 3)
    assert model.calls[-1][2:] == (3, True, True)
    assert encoder.get_sentence_embedding_dimension() == 4 and encoder.max_seq_length == 16
    same = encoder.similarity(array, array)
    assert same.shape == (2, 2) and torch.allclose(same.diagonal(), torch.ones(2))
    first, second = torch.tensor([3.0, 0.0]), torch.tensor([[0.0, 4.0], [6.0, 0.0]])
    for name, expected in [
        ("cosine", [0.0, 1.0]), ("dot", [0.0, 18.0]), ("euclidean", [-5.0, -3.0]), ("manhattan", [-7.0, -3.0]),
    ]:  # fmt: skip
        model.similarity_fn_name = name
        assert encoder.similarity(first, second).tolist() == [expected], name


def test_prompts_of_sentence_vectors(model):
    encoder = SentenceEncoder(model)
    encoder.encode_query("a")
    encoder.encode_document(["a"])
    encoder.encode("a", prompt="P: ")
    encoder.encode("a", prompt="other: ")
    assert [call[:2] for call in model.calls] == [
        (["a"], "query"), (["a"], "passage"), (["a"], "passage"), (["other: a"], None),
    ]  # fmt: skip
    model.default_prompt_name = "query"
    with pytest.raises(ValueError, match="always has a prompt"):
        encoder.encode("a", prompt="other: ")
    assert query_prompt({}) is None and document_prompt({"corpus": "", "document": ""}) == "document"


@pytest.mark.parametrize("options", [{"output_value": "token_embeddings"}, {"precision": "int8"}], ids=repr)
def test_what_is_not_implemented_is_refused(model, options):
    with pytest.raises(NotImplementedError, match=next(iter(options))):
        SentenceEncoder(model).encode(TEXTS, **options)
