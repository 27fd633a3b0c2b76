"""Answers for clients: OpenAI's vectors, vLLM's ranks, scores and labels, and bare lists of text-embeddings-inference.

A form is a function of the request, the answer, the envelope, and the names of labels. It runs in a worker.
"""

from __future__ import annotations

from typing import Any

from pace.server.embeddings.floats import as_base64, shortest
from pace.server.embeddings.jobs import Encoded
from pace.server.embeddings.requests import ClassifyRequest, EmbeddingsRequest, RerankRequest, ScoreRequest
from pace.server.embeddings.tei import EmbedRequest, PredictRequest
from pace.server.wire.openai import Envelope

Labels = dict[int, str]


def embeddings(request: EmbeddingsRequest, encoded: Encoded, envelope: Envelope, labels: Labels) -> Any:
    if request.is_base64:
        vectors = [as_base64(row) for row in encoded.values]
    else:
        vectors = shortest(encoded.values).tolist()
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": envelope.model, "usage": _usage(encoded)}


def ranks(request: RerankRequest, encoded: Encoded, envelope: Envelope, labels: Labels) -> Any:
    """The documents, best first. Those with equal scores stay in their order."""
    scores = shortest(encoded.values[:, 0]).tolist()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    returns_texts = request.return_documents or request.return_text
    if request.is_tei:
        texts = {index: {"text": _text(request, index)} for index in order} if returns_texts else {}
        return [{"index": index, "score": scores[index]} | texts.get(index, {}) for index in order]
    results = [{"index": index, "relevance_score": scores[index]} for index in order]
    if returns_texts:
        results = [result | {"document": {"text": _text(request, result["index"])}} for result in results]
    return _members(envelope, encoded, "results", results)


def scores(request: ScoreRequest, encoded: Encoded, envelope: Envelope, labels: Labels) -> Any:
    values = shortest(encoded.values[:, 0]).tolist()
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(values)]
    return _members(envelope, encoded, "data", data)


def classes(request: ClassifyRequest, encoded: Encoded, envelope: Envelope, labels: Labels) -> Any:
    data = []
    for index, (row, best) in enumerate(zip(shortest(encoded.values).tolist(), encoded.values.argmax(1).tolist())):
        data.append({"index": index, "label": labels[best], "probs": row, "num_classes": len(row)})
    return _members(envelope, encoded, "data", data)


def bare_embeddings(request: EmbedRequest, encoded: Encoded, envelope: Envelope, labels: Labels) -> Any:
    return shortest(encoded.values).tolist()


def bare_predictions(request: PredictRequest, encoded: Encoded, envelope: Envelope, labels: Labels) -> Any:
    """The labels of each text, best first."""
    rows = [
        [{"score": score, "label": labels[index]} for index, score in sorted(enumerate(row), key=lambda one: -one[1])]
        for row in shortest(encoded.values).tolist()
    ]
    return rows if request.is_batch else rows[0]


def _members(envelope: Envelope, encoded: Encoded, name: str, entries: list[Any]) -> dict[str, Any]:
    head = {"id": envelope.id, "object": "list", "created": envelope.created, "model": envelope.model}
    return {**head, name: entries, "usage": _usage(encoded)}


def _usage(encoded: Encoded) -> dict[str, int]:
    num_tokens = sum(encoded.num_tokens)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _text(request: RerankRequest, index: int) -> str:
    document = request.given[index]
    return document["text"] if isinstance(document, dict) else document
