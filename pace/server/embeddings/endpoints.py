"""Endpoints for vectors, scores and labels. `ENCODING_ENDPOINTS` is the table of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.server.embeddings import forms
from pace.server.embeddings.jobs import Encoded
from pace.server.embeddings.requests import ClassifyRequest, EmbeddingsRequest, RerankRequest, ScoreRequest
from pace.server.embeddings.service import EmbeddingService
from pace.server.embeddings.tei import EmbedRequest, PredictRequest
from pace.server.endpoints import Endpoint
from pace.server.network import http
from pace.server.network.access_log import Access
from pace.server.wire.form import dumps
from pace.server.wire.openai import Envelope

Form = Callable[[Any, Encoded, Envelope, forms.Labels], Any]


@dataclass(frozen=True)
class EncodingEndpoint(Endpoint):
    """Endpoint answered by an `EmbeddingService`. Its schema has `to_job`."""

    form: Form
    id_prefix: str
    task: ClassVar[str] = "embed"

    async def answer(
        self, service: EmbeddingService, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send
    ) -> None:
        name = service.check_model(request.model)
        job = request.to_job(service.limits)
        client = scope.get("pace") or {}
        envelope = Envelope.new(self.id_prefix, name, "")
        form = lambda encoded: dumps(self.form(request, encoded, envelope, service.labels))
        encoded, body = await service.encode(job, form, client.get("salt"), client.get("key"))
        Access.of(scope).answer = encoded
        await http.send_bytes(send, body, headers={"content-type": "application/json", **headers})


ENCODING_ENDPOINTS: tuple[EncodingEndpoint, ...] = (
    EncodingEndpoint(("/v1/embeddings", "/embeddings"), EmbeddingsRequest, forms.embeddings, "embd-"),
    EncodingEndpoint(
        ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking"), RerankRequest, forms.ranks, "rerank-"
    ),
    EncodingEndpoint(("/v1/score", "/score"), ScoreRequest, forms.scores, "score-"),
    EncodingEndpoint(("/v1/classify", "/classify"), ClassifyRequest, forms.classes, "classify-"),
    EncodingEndpoint(("/embed", "/"), EmbedRequest, forms.bare_embeddings, "embd-"),
    EncodingEndpoint(("/predict",), PredictRequest, forms.bare_predictions, "classify-"),
)
